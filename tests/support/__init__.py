"""What tests and benchmarks share, imported as `support.…` from `tests` on the path."""
