"""Casts and splits: torch only, no host. Numba and Triton are optional and imported on first use."""

from .cast import Backend, cast_blockwise_into, cast_per_channel_into, warmup
from .checks import FP8_DTYPE, block_scale_shape
from .reference import FP8_MAX, dequantize, quantize_blockwise, quantize_per_channel
from .sqnr import sqnr_db

__all__ = [
    "FP8_DTYPE",
    "FP8_MAX",
    "Backend",
    "block_scale_shape",
    "cast_blockwise_into",
    "cast_per_channel_into",
    "dequantize",
    "quantize_blockwise",
    "quantize_per_channel",
    "sqnr_db",
    "warmup",
]
