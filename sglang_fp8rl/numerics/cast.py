"""The cast that the engine uses: in place, into any region, on the fastest backend at hand.

Same definition as `reference.py`, byte for byte. A block with a NaN or Inf keeps its old codes and
its old scale, and is reported in the returned flags, which are on the source's device so that
nothing here waits for a GPU.
"""

from __future__ import annotations

import functools
import importlib
from types import ModuleType
from typing import Literal

import torch

from .checks import check_destination, check_scale, check_source
from .grid import ScaleGranularity

Backend = Literal["auto", "reference", "numba", "triton"]
# Module of each backend; it has a `cast_into`.
_MODULES = {"reference": ".reference", "numba": ".cpu.cast", "triton": ".triton.cast"}
_FASTEST = {"cpu": "numba", "cuda": "triton"}


def cast_into(
    source: torch.Tensor,
    qweight: torch.Tensor,
    weight_scale: torch.Tensor,
    granularity: ScaleGranularity,
    *,
    pow2_scale: bool = False,
    round_to_bf16: bool = True,
    name: str = "weight",
    backend: Backend = "auto",
) -> torch.Tensor:
    """Quantize `source` into `qweight` and `weight_scale`, without copies.

    Args:
        source: [N, K] FP32, BF16 or FP16; any strides and offset.
        qweight: [N, K] e4m3fn; rows contiguous, any row stride and offset.
        weight_scale: FP32 of the granularity's scale shape; any strides and offset.
        granularity: `Blockwise()`, one scale for each block, or `PerChannel()`, one for each row.
        name: what errors call the tensor.
        backend: "auto" is Triton on CUDA, Numba on CPU, else plain PyTorch ("reference"), which
            streams one row of blocks at a time.

    Returns:
        bool of the scales' shape on the source's device: True where the block is not finite and was
        not written.

    Raises:
        QuantizationError: shapes, dtypes, strides or devices that do not fit.
    """
    check_source(source, name)
    check_destination(source, qweight, name)
    check_scale(source, weight_scale, granularity.grid(source.shape).scale_shape, name)
    module = _module(_fastest(source.device) if backend == "auto" else backend)
    return module.cast_into(source, qweight, weight_scale, granularity, pow2_scale, round_to_bf16)


def warmup() -> None:
    """Compile the CPU kernels now instead of in the first update; nothing without Numba."""
    if is_there("numba"):
        for module in (".cpu.cast", ".cpu.table"):
            importlib.import_module(module, __package__).warmup()


def _module(backend: str) -> ModuleType:
    """A backend asked for by name is not replaced by another."""
    if backend not in _MODULES:
        raise ValueError(f"backend {backend!r}: one of auto, {', '.join(_MODULES)}")
    return importlib.import_module(_MODULES[backend], __package__)


def _fastest(device: torch.device) -> str:
    backend = _FASTEST.get(device.type, "reference")
    return backend if is_there(backend) else "reference"


@functools.cache
def is_there(backend: str) -> bool:
    """Whether the library of an optional backend can be imported.

    The library and nothing of ours, so that our own fault is never taken for its absence.
    """
    if backend == "reference":
        return True
    try:
        importlib.import_module(backend)
    except ImportError:  # Numba also raises it for a NumPy it doesn't know
        return False
    return True
