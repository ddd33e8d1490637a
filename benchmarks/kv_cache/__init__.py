"""Parts of the benchmarks of an FP8 KV cache."""
