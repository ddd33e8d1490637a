"""As in `tests/conftest.py`: `--all-packages`."""

pytest_plugins = ["support.missing_packages"]
