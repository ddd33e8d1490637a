"""The cast that the engine uses: in place, into any region, on the fastest backend at hand.

Same definition as `reference.py`, byte for byte. A block with a NaN or Inf keeps its old codes and
its old scale, and is reported in the returned flags, which live on the source's device so that
nothing here waits for a GPU.
"""

from __future__ import annotations

import functools
import importlib
from types import ModuleType
from typing import Literal

import torch

from . import reference
from .checks import (
    block_scale_shape,
    check_block_size,
    check_destination,
    check_scale,
    check_source,
)

Backend = Literal["auto", "reference", "numba", "triton"]
_FASTEST = {"cpu": "cpu_numba", "cuda": "triton_cast"}


def cast_blockwise_into(
    source: torch.Tensor,
    qweight: torch.Tensor,
    weight_scale_inv: torch.Tensor,
    *,
    block_size: tuple[int, int] = (128, 128),
    pow2_scale: bool = False,
    round_to_bf16: bool = True,
    name: str = "weight",
    backend: Backend = "auto",
) -> torch.Tensor:
    """Quantize `source` block by block into `qweight` and `weight_scale_inv`, without copies.

    Args:
        source: [N, K] FP32, BF16 or FP16; any strides and offset.
        qweight: [N, K] e4m3fn; rows contiguous, any row stride and offset.
        weight_scale_inv: [ceil(N / block_n), ceil(K / block_k)] FP32; any strides and offset.
        name: what errors call the tensor.
        backend: "auto" is Triton on CUDA, Numba on CPU, else plain PyTorch ("reference"), which
            streams one row of blocks at a time.

    Returns:
        bool [ceil(N / block_n), ceil(K / block_k)] on the source's device: True where the block is
        not finite and was not written.

    Raises:
        QuantizationError: shapes, dtypes, strides or devices that do not fit.
    """
    block_n, block_k = check_block_size(block_size)
    check_source(source, name)
    check_destination(source, qweight, name)
    check_scale(source, weight_scale_inv, block_scale_shape(source.shape, block_size), name)
    module = _backend(backend, source.device)
    return module.cast_into(
        source, qweight, weight_scale_inv, (block_n, block_k), pow2_scale, round_to_bf16
    )


def cast_per_channel_into(
    source: torch.Tensor,
    qweight: torch.Tensor,
    weight_scale: torch.Tensor,
    *,
    pow2_scale: bool = False,
    round_to_bf16: bool = True,
    name: str = "weight",
    backend: Backend = "auto",
) -> torch.Tensor:
    """Quantize each row of `source` with its own scale; otherwise as `cast_blockwise_into`.

    Args:
        weight_scale: [N, 1] or [N] FP32; any strides and offset.

    Returns:
        bool [N] on the source's device: True where the row is not finite and was not written.
    """
    check_source(source, name)
    check_destination(source, qweight, name)
    rows, cols = source.shape
    column = weight_scale.unsqueeze(1) if weight_scale.dim() == 1 else weight_scale
    check_scale(source, column, (rows, 1), name)
    module = _backend(backend, source.device)
    flags = module.cast_into(source, qweight, column, (1, cols), pow2_scale, round_to_bf16)
    return flags.squeeze(1)


def warmup() -> None:
    """Compile the CPU kernels now instead of in the first update; nothing without Numba."""
    for name in ("cpu_numba", "cpu_table"):
        if (module := _import(name)) is not None:
            module.warmup()


def _backend(backend: Backend, device: torch.device) -> ModuleType:
    """The module whose `cast_into` does the work. A backend asked for by name is not replaced."""
    if backend == "auto":
        fast = _FASTEST.get(device.type)
        return (_import(fast) if fast else None) or reference
    if backend == "reference":
        return reference
    names = {"numba": "cpu_numba", "triton": "triton_cast"}
    if backend not in names:
        raise ValueError(f"backend {backend!r}: one of auto, reference, numba, triton")
    return importlib.import_module(f".{names[backend]}", __package__)


@functools.cache
def _import(module: str) -> ModuleType | None:
    """An optional backend, or None: Numba also raises ImportError for a NumPy it doesn't know."""
    try:
        return importlib.import_module(f".{module}", __package__)
    except ImportError:
        return None
