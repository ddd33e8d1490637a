"""What every cast asks of its arguments, with errors that name tensor, value, rule and remedy."""

from __future__ import annotations

from typing import NoReturn

import torch

from ..errors import QuantizationError
from .grid import BlockGrid

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
