"""Powers of two that keep an FP8 KV cache in range, folded into weights."""
