"""`sglang-fp8rl demo`: the main job on real parts, and a check that every output is right."""
