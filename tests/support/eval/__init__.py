"""A server of answers and a small model for the tests of `lab/eval`."""
