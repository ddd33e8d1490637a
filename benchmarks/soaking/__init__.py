"""Parts of `benchmarks/soak.py`."""
