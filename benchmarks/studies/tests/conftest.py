"""As in `tests/conftest.py`: `--all-packages`, and fixtures that are not of engines."""

pytest_plugins = ["support.fixtures", "support.missing_packages"]
