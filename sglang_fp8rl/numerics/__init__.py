"""Casts and splits: torch only, no host. Numba and Triton are optional and imported on first use."""

from .cast import cast_into, quantize, quantize_blockwise, quantize_per_channel, through_fp8
from .reference import FP8_DTYPE, FP8_MAX, dequantize

__all__ = [
    "FP8_DTYPE",
    "FP8_MAX",
    "cast_into",
    "dequantize",
    "quantize",
    "quantize_blockwise",
    "quantize_per_channel",
    "through_fp8",
]
