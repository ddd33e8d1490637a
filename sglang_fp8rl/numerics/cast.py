"""The casts that everything uses: into codes and scales, new or in place in any region, or through FP8 and back.

The definition is `reference.py`; every backend gives its bytes. Copies in high precision are here too.
"""

from __future__ import annotations

from typing import Any

import torch

from ..errors import QuantizationError
from ..formats.format import BlockGrid, BlockSize
from . import reference
from .backends import Backend, kernels
from .reference import FP8_DTYPE
from .write_table import WIDE, Piece

# Of a source that is copied or looked at in parts, so that no temporary grows with it: about this much at a
# time, and on a CPU what its caches hold of what a kernel reads at once.
_CHUNK_ELEMENTS, _CACHED_ELEMENTS = 4 * 1024 * 1024, 256 * 1024


def cast_into(
    source: torch.Tensor,
    qweight: torch.Tensor,
    weight_scale: torch.Tensor,
    block_size: BlockSize,
    *,
    pow2_scale: bool = False,
    round_to_bf16: bool = True,
    name: str = "weight",
    backend: Backend = "auto",
) -> torch.Tensor:
    """Quantize `source` into `qweight` and `weight_scale`; allocates nothing of their size.

    Args:
        source: [N, K] FP32, BF16 or FP16; any strides.
        qweight: [N, K] e4m3fn; rows contiguous, any row stride.
        weight_scale: FP32 [ceil(N / block_n), ceil(K / block_k)]; any strides.
        block_size: [block_n, block_k], what shares one scale; None is all of that side.
        pow2_scale: round every scale up to a power of two (`use_weight_pow2_scale`).
        round_to_bf16: False casts FP32 without the step to BF16, for research: other codes than a
            BF16 trainer's.
        name: what errors call the tensor.
        backend: "auto" is Triton on CUDA, Numba on CPU, else plain PyTorch ("reference"), which
            streams some rows of blocks at a time.

    Returns:
        bool of the scales' shape on the source's device: True where the block is not finite and was
        not written. Nothing here waits for a GPU.

    Raises:
        QuantizationError: shapes, dtypes, strides or devices that do not fit.
    """
    grid = _grid_of(source, block_size, name)
    _check_destinations(source, qweight, weight_scale, grid, name)
    return _cast(source, qweight, weight_scale, grid, pow2_scale, round_to_bf16, backend, name)


def through_fp8(
    weight: torch.Tensor,
    block_size: BlockSize,
    *,
    pow2_scale: bool = False,
    round_to_bf16: bool = True,
    name: str = "weight",
    backend: Backend = "auto",
) -> torch.Tensor:
    """Cast `weight` to FP8 and back to BF16 [N, K], contiguous: what a server computes with.

    A block with a NaN or Inf comes out unquantized: whoever computes with it sees the NaN, and nothing
    here waits for a GPU. Arguments are those of `cast_into`.

    Raises:
        QuantizationError: wrong dtype or rank.
    """
    grid = _grid_of(weight, block_size, name)
    (rows, columns), (block_n, block_k) = grid.shape, grid.block
    if block_n == 1 and columns % block_k == 0:  # as rows of that length, which all kernels know
        grid = BlockGrid((rows * columns // block_k, block_k), grid.block)
    source = weight.reshape(grid.shape)
    out = torch.empty(source.shape, dtype=torch.bfloat16, device=source.device)
    scales = torch.empty(grid.scale_shape, dtype=torch.float32, device=source.device)
    _cast(source, out, scales, grid, pow2_scale, round_to_bf16, backend, name)
    return out.view(weight.shape)


def quantize(
    weight: torch.Tensor,
    block_size: BlockSize = (128, 128),
    *,
    pow2_scale: bool = False,
    round_to_bf16: bool = True,
    name: str = "weight",
    backend: Backend = "auto",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize `weight`. Arguments are those of `cast_into`.

    Returns:
        `qweight` [N, K] e4m3fn, contiguous, and the FP32 scales [ceil(N / block_n), ceil(K / block_k)], on the
        weight's device.

    Raises:
        QuantizationError: wrong dtype or rank; or a NaN or Inf: names the block. Asking for one
            waits for a GPU.
    """
    grid = _grid_of(weight, block_size, name)
    qweight = torch.empty(weight.shape, dtype=FP8_DTYPE, device=weight.device)
    scale = torch.empty(grid.scale_shape, dtype=torch.float32, device=weight.device)
    nonfinite = _cast(weight, qweight, scale, grid, pow2_scale, round_to_bf16, backend, name)
    refuse_not_finite(nonfinite, grid, name)
    return qweight, scale


def refuse_not_finite(nonfinite: torch.Tensor, grid: BlockGrid, name: str) -> None:
    """Raise `QuantizationError` if a block of the grid is flagged; names the first. Waits for a GPU."""
    if bool(nonfinite.any()):
        where = nonfinite.nonzero()
        i, j = where[0].tolist()
        rows, columns = (
            f"{at * step}:{min((at + 1) * step, full)}"
            for at, step, full in zip((i, j), grid.block, grid.shape, strict=True)
        )
        raise QuantizationError(
            name,
            f"NaN or Inf in block ({i}, {j}), rows {rows}, columns {columns}"
            f" ({len(where)} of {nonfinite.numel()} blocks; BF16 overflows to Inf from 3.3962e38)",
            "a block that is not finite is never quantized",
            "Look at the step that produced this weight",
        )


quantize_blockwise = quantize  # under the name that users import


def quantize_per_channel(
    weight: torch.Tensor,
    *,
    pow2_scale: bool = False,
    round_to_bf16: bool = True,
    name: str = "weight",
) -> tuple[torch.Tensor, torch.Tensor]:
    """`quantize` by rows: `weight_scale` [N, 1] is of the rows of this (local) shard, a multiplier like
    `weight_scale_inv`: both names are SGLang's."""
    rounding: Any = {"pow2_scale": pow2_scale, "round_to_bf16": round_to_bf16}
    return quantize(weight, (1, None), name=name, **rounding)


def _cast(
    source: torch.Tensor,
    target: torch.Tensor,
    scales: torch.Tensor,
    grid: BlockGrid,
    pow2_scale: bool,
    round_to_bf16: bool,
    backend: Backend,
    name: str,
) -> torch.Tensor:
    """Write codes, or in a BF16 `target` what they and their scales stand for; returns flags as `cast_into`."""
    # Of a lazily negated source the memory has the other sign.
    source, target, scales = source.detach().resolve_neg(), target.detach(), scales.detach()
    nonfinite = torch.empty(grid.scale_shape, dtype=torch.bool, device=source.device)
    how = (grid.block, pow2_scale, round_to_bf16)
    module = kernels("table", source.device.type, backend) or reference
    if module is not reference and not lies_in_memory(source):
        raise _no_matrix(name, source)
    lies_in_rows = source.stride(1) == 1 or source.shape[1] == 1
    if module is reference or lies_in_rows:
        module.cast_into(source, target, scales, nonfinite, *how)
        return nonfinite
    # Kernels take contiguous rows. Of anything else some rows of blocks are copied for them, into the same memory.
    strips = list(grid.strips(_CHUNK_ELEMENTS if source.is_cuda else _CACHED_ELEMENTS))
    room = torch.empty(source[strips[0][0]].shape, dtype=source.dtype, device=source.device)
    for rows, blocks in strips:
        part = room[: rows.stop - rows.start].copy_(source[rows])
        module.cast_into(part, target[rows], scales[blocks], nonfinite[blocks], *how)
    return nonfinite


def _grid_of(source: torch.Tensor, block_size: BlockSize, name: str) -> BlockGrid:
    """The blocks of a source. Refuses what is no non-empty matrix in FP32, BF16 or FP16."""
    refuse_dtype(source.dtype, name)
    if source.dim() != 2 or source.numel() == 0:
        raise _no_matrix(name, source)
    return BlockGrid.of(source.shape, block_size)


def refuse_dtype(dtype: torch.dtype, name: str) -> None:
    """Raise `QuantizationError` for what is not cast. FP64→FP32→BF16 would round twice, and no trainer sends FP64."""
    if dtype not in WIDE:
        raise QuantizationError(
            name,
            f"dtype {dtype}",
            "a weight is cast to FP8 from FP32, BF16 or FP16",
            "Send the master weight, or for an FP8 weight its weight_scale_inv with it",
        )


def _no_matrix(name: str, source: torch.Tensor) -> QuantizationError:
    return QuantizationError(
        name,
        f"shape {list(source.shape)}",
        "a cast works on a non-empty matrix [N, K] in memory",
        "Pass one expert or one shard at a time, as a 2-D view; nothing freed or wrapped",
    )


def _check_destinations(
    source: torch.Tensor, qweight: torch.Tensor, scale: torch.Tensor, grid: BlockGrid, name: str
) -> None:
    """Refuse codes and scales of another dtype, shape or device, or that overlap."""
    for what, tensor, dtype, shape in (
        ("codes", qweight, FP8_DTYPE, grid.shape),
        ("weight scale", scale, torch.float32, grid.scale_shape),
    ):
        if tensor.dtype != dtype or tensor.shape != shape or tensor.device != source.device:
            raise QuantizationError(
                name,
                f"source {list(source.shape)} for {what} {list(tensor.shape)} of dtype"
                f" {tensor.dtype} on {tensor.device}",
                f"they are {dtype}, of shape {list(shape)}, on {source.device} as the source",
                "Pass the region that is written, of a buffer on the source's device",
            )
    (rows, cols), (stride_n, stride_k) = qweight.shape, qweight.stride()
    is_expanded = any(
        n > 1 and not step for n, step in zip(scale.shape, scale.stride(), strict=True)
    )
    if is_expanded or (cols > 1 and stride_k != 1) or (rows > 1 and stride_n < cols):
        raise QuantizationError(
            name,
            f"codes {[rows, cols]} of strides {[stride_n, stride_k]}, weight scales of strides"
            f" {list(scale.stride())}",
            "the codes of a row are contiguous, rows do not overlap, and each scale has its own memory",
            "Pass a row-major view of codes, and no expanded one of scales",
        )


def lies_in_memory(tensor: torch.Tensor) -> bool:
    """Whether a tensor that is not empty has its elements where kernels would read them: it wraps no others, and was not
    freed."""
    return bool(tensor.data_ptr() and tensor.untyped_storage().nbytes())


def has_nan_code(codes: torch.Tensor) -> bool:
    """Whether e4m3fn codes have one of the two NaN, 0x7F and 0xFF. Takes no memory; waits for a GPU."""
    if codes.numel() == 0:
        return False
    # The first is the greatest of all bytes with a sign, the second of all without.
    return int(codes.view(torch.int8).max()) == 0x7F or int(codes.view(torch.uint8).max()) == 0xFF


def copy_finite_into(
    source: torch.Tensor, destination: torch.Tensor, *, backend: Backend = "auto"
) -> torch.Tensor:
    """`destination.copy_(source)` row by row, leaving out rows that would hold a NaN or Inf.

    Args:
        source: any floating-point dtype, any strides; its rows are along the last dimension.
        destination: of the same shape; rounded to nearest even where it has fewer bits. A number that
            overflows (BF16 from 3.3962e38 on, FP16 from 65520) would be Inf.
        backend: as of `cast_into`.

    Returns:
        bool [rows] on the source's device: True where a row is not finite and was not written.
        Nothing here waits for a GPU.
    """
    source, destination = source.detach().resolve_neg(), destination.detach()
    rows, outs = as_matrix(source), as_matrix(destination)
    if outs is None or rows is None:
        # Not a matrix in memory: whole or not at all.
        rounded = source.to(destination.dtype)
        bad = ~torch.isfinite(rounded).all().reshape(1)
        destination.copy_(torch.where(bad, destination, rounded))
        return bad
    bad = torch.empty(len(rows), dtype=torch.bool, device=source.device)
    module = kernels("table", source.device.type, backend)
    if module is not None and Piece(rows, outs).fits():
        module.copy_into(rows, outs, bad)
        return bad
    step = max(1, _CHUNK_ELEMENTS // max(1, rows.shape[1]))
    for some, out, flags in zip(rows.split(step), outs.split(step), bad.split(step), strict=True):
        rounded = some.to(out.dtype)
        flags.copy_(~torch.isfinite(rounded).all(1))
        out.copy_(torch.where(flags[:, None], out, rounded))
    return bad


def as_matrix(tensor: torch.Tensor) -> torch.Tensor | None:
    """A view [rows, last dimension], or None where there is none."""
    if tensor.dim() == 2:
        return tensor
    if tensor.dim() < 2:
        return tensor.reshape(1, -1)
    return tensor.flatten(0, -2) if tensor.is_contiguous() else None
