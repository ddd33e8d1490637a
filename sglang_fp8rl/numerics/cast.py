"""The cast that the engine uses: in place, into any region, on the fastest backend at hand.

Same definition as `reference.py`, byte for byte. A block with a NaN or Inf keeps its old codes and
its old scale, and is reported in the returned flags, which are on the source's device so that
nothing here waits for a GPU. What any cast asks of its arguments is here too, with errors that name
tensor, value, rule and remedy.
"""

from __future__ import annotations

import functools
import importlib
from types import ModuleType
from typing import Literal, NoReturn

import torch

from ..errors import QuantizationError
from .grid import BlockGrid, ScaleGranularity

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


FP8_DTYPE = torch.float8_e4m3fn
SOURCE_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def check_source(source: torch.Tensor, name: str) -> None:
    """A cast starts from a non-empty matrix in FP32, BF16 or FP16.

    FP64 is refused rather than narrowed: FP64→FP32→BF16 rounds twice, and no trainer sends it.
    """
    if source.dtype not in SOURCE_DTYPES:
        _refuse(
            name,
            f"dtype {source.dtype}",
            "a weight is cast to FP8 from FP32, BF16 or FP16",
            "Send the master weight, or for an FP8 weight its weight_scale_inv with it",
        )
    if source.dim() != 2 or source.numel() == 0:
        _refuse(
            name,
            f"shape {list(source.shape)}",
            "a cast works on a non-empty matrix [N, K]",
            "Pass one expert or one shard at a time, as a 2-D view",
        )


def check_destination(source: torch.Tensor, qweight: torch.Tensor, name: str) -> None:
    """`qweight` takes the codes of `source`: same shape and device, e4m3fn, rows apart."""
    if qweight.dtype != FP8_DTYPE:
        _refuse(
            name,
            f"destination dtype {qweight.dtype}",
            f"codes are stored as {FP8_DTYPE}",
            "Allocate the weight with that dtype",
        )
    if qweight.shape != source.shape:
        _refuse(
            name,
            f"source {list(source.shape)} for destination {list(qweight.shape)}",
            "a cast writes a region of the source's own shape",
            "Narrow the destination to the shard being written",
        )
    _check_same_device(source, qweight, "destination", name)
    rows, cols = qweight.shape
    if (cols > 1 and qweight.stride(1) != 1) or (rows > 1 and qweight.stride(0) < cols):
        _refuse(
            name,
            f"destination strides {list(qweight.stride())} for shape {list(qweight.shape)}",
            "the codes of a row are contiguous and rows do not overlap",
            "Pass a row-major view",
        )


def check_scale(
    source: torch.Tensor, weight_scale: torch.Tensor, shape: tuple[int, int], name: str
) -> None:
    """`weight_scale` is FP32, of `shape`, on the source's device; any strides."""
    if weight_scale.dtype != torch.float32:
        _refuse(
            name,
            f"weight scale dtype {weight_scale.dtype}",
            "weight scales are stored in FP32",
            "Allocate them with dtype=torch.float32",
        )
    if tuple(weight_scale.shape) != shape:
        _refuse(
            name,
            f"weight scale {list(weight_scale.shape)} for source {list(source.shape)}",
            f"this source has weight scales of shape {list(shape)}",
            "Narrow the weight scales to the blocks being written",
        )
    stride_n, stride_k = weight_scale.stride()
    if (shape[0] > 1 and stride_n == 0) or (shape[1] > 1 and stride_k == 0):
        _refuse(
            name,
            f"weight scale strides {list(weight_scale.stride())}",
            "each weight scale has its own memory",
            "Do not pass an expanded view",
        )
    _check_same_device(source, weight_scale, "weight scales", name)


def has_nan_code(codes: torch.Tensor) -> bool:
    """Whether e4m3fn codes have one of the two NaN, 0x7F and 0xFF. Takes no memory; waits for a GPU.

    The first is the greatest of all bytes with a sign, the second of all without.
    """
    if codes.numel() == 0:
        return False
    return int(codes.view(torch.int8).max()) == 0x7F or int(codes.view(torch.uint8).max()) == 0xFF


def raise_not_finite(nonfinite: torch.Tensor, grid: BlockGrid, name: str) -> NoReturn:
    """Name the first bad block, its rows and columns, and how many there are."""
    where = nonfinite.nonzero()
    i, j = (int(v) for v in where[0])
    rows, cols = (f"{part.start}:{part.stop}" for part in grid.values_of(i, j))
    _refuse(
        name,
        f"NaN or Inf in block ({i}, {j}), rows {rows}, columns {cols}"
        f" ({len(where)} of {nonfinite.numel()} blocks; BF16 overflows to Inf from 3.3962e38)",
        "a block that is not finite is never quantized",
        "Look at the step that produced this weight",
    )


def _check_same_device(source: torch.Tensor, other: torch.Tensor, what: str, name: str) -> None:
    if other.device != source.device:
        _refuse(
            name,
            f"source on {source.device}, {what} on {other.device}",
            "a cast reads and writes on one device",
            "Move the source first",
        )


def _refuse(name: str, value: str, rule: str, remedy: str) -> NoReturn:
    raise QuantizationError(name, value, rule, remedy)


# Of a source whose rows are checked and copied at a time, so that no temporary grows with it.
_CHUNK_ELEMENTS = 4 * 1024 * 1024


def copy_finite_into(source: torch.Tensor, destination: torch.Tensor) -> torch.Tensor:
    """`destination.copy_(source)` row by row, leaving out rows that would hold a NaN or Inf.

    Args:
        source: any floating-point dtype, any strides; its rows are along the last dimension.
        destination: of the same shape; rounded to nearest even where it has fewer bits.

    Returns:
        bool [rows] on the source's device: True where a row is not finite and was not written.
        Nothing here waits for a GPU.
    """
    rows, outs = as_matrix(source), as_matrix(destination)
    if outs is None or rows is None:
        # Not a matrix in memory: whole or not at all.
        rounded = source.to(destination.dtype)
        bad = ~torch.isfinite(rounded).all().reshape(1)
        destination.copy_(torch.where(bad, destination, rounded))
        return bad
    flags = []
    step = max(1, _CHUNK_ELEMENTS // max(1, rows.shape[1]))
    for start in range(0, rows.shape[0], step):
        chunk, out = rows[start : start + step], outs[start : start + step]
        # The extremes see everything: NaN spreads, Inf is one, and what rounds to Inf is the largest.
        low, high = (extreme.to(out.dtype) for extreme in torch.aminmax(chunk, dim=1))
        bad = ~(torch.isfinite(low) & torch.isfinite(high))
        flags.append(bad)
        if chunk.device.type == "cpu" and not bool(bad.any()):
            out.copy_(chunk)
        else:
            out.copy_(torch.where(bad.unsqueeze(1), out, chunk.to(out.dtype)))
    return torch.cat(flags) if flags else torch.zeros(0, dtype=torch.bool, device=source.device)


def as_matrix(tensor: torch.Tensor) -> torch.Tensor | None:
    """A view [rows, last dimension], or None where there is none."""
    if tensor.dim() == 2:
        return tensor
    if tensor.dim() < 2:
        return tensor.reshape(1, -1)
    return tensor.flatten(0, -2) if tensor.is_contiguous() else None
