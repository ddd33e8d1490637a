"""Small seeded checkpoints and a real server, for the tests and for `sglang-fp8rl demo`."""
