"""The quantization methods of SGLang's layers, and their configuration."""
