"""Casts and copies of one matrix on a GPU: one launch, its place and shape given as plain numbers.

Nothing is uploaded and nothing waits, so that a model's loaders, which bring one matrix after the other, are
not held up, and a CUDA graph may capture it.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import Any

import torch

from .. import reference
from ..write_table import DTYPES, LONGEST_ROW
from .arithmetic import has_packed_kernels
from .kernels import matrix_cast_kernel, matrix_copy_kernel

BLOCK = 128  # rows and columns of the blocks that have kernels
WIDEST = 16  # bytes of a load or store
# A row is one program's, of one of these sizes: a launch for each that a table has. Registers hold 65,536
# columns, longer rows are spilled.
CHUNKS = (64, 512, *(2**n for n in range(11, LONGEST_ROW.bit_length())))
# Elements of a row per thread, in two stores: what a row costs is shared by so many.
_ROW_ELEMENTS = 32
_TILE_WARPS = 8
# With 64 registers for each of 256 threads, four programs fit on a multiprocessor. Narrow loads and
# stores need an address each, which would be spilled.
_TILE_REGISTERS, _TILE_REGISTERS_FROM = 64, 8


def row_warps(chunk: int) -> int:
    """Warps of a program that takes `chunk` elements of a row at a time."""
    return max(1, min(16, chunk // (32 * _ROW_ELEMENTS)))


def cast_options(
    chunk: int, is_ragged: bool, target_align: int, is_through: bool = False
) -> dict[str, Any]:
    """Sizes and launch options of a program for each channel of at most `chunk` columns, or each block (0)."""
    if chunk:
        return {"HEIGHT": 1, "WIDTH": chunk, "RAGGED": True, "num_warps": row_warps(chunk)}
    options = {"HEIGHT": BLOCK, "WIDTH": BLOCK, "RAGGED": is_ragged, "num_warps": _TILE_WARPS}
    # From FP32 ragged blocks take some registers more on their way through.
    if target_align >= _TILE_REGISTERS_FROM and not is_through:
        options["maxnreg"] = _TILE_REGISTERS
    return options


def kernels_for(block_n: Any, block_k: Any, cols: Any) -> tuple[Any, Any]:
    """Whether such blocks are the rows that a kernel casts, or the squares; of arrays, each."""
    return (block_n == 1) & (block_k == cols), (block_n == BLOCK) & (block_k == BLOCK)


def cast_into(
    source: torch.Tensor,
    target: torch.Tensor,
    scales: torch.Tensor,
    nonfinite: torch.Tensor,
    block: tuple[int, int],
    pow2_scale: bool,
    round_to_bf16: bool,
) -> None:
    """As `reference.cast_into`, of contiguous rows; a NaN in BF16 may have other bits.

    A BF16 target is contiguous and gets neither scales nor flags. Blocks that no server has, and longer rows, are
    PyTorch's.
    """
    cols, is_through = source.shape[1], target.dtype == torch.bfloat16
    is_row, is_block = kernels_for(*block, cols)
    if not (is_row or is_block) or (cols > LONGEST_ROW and (is_row or is_through)):
        outs = (target, scales, nonfinite)
        reference.cast_into(source, *outs, block, pow2_scale, round_to_bf16)
        return
    source = source.contiguous() if is_through else source
    rounding = {"POW2": bool(pow2_scale), "ROUND": bool(round_to_bf16)}
    constants = constants_of(source, target, is_row, rounding)
    with torch.cuda.device_of(source):  # on which Triton launches
        matrix_cast_kernel[(nonfinite.numel(),)](
            source.data_ptr(), source.stride(0), target.data_ptr(), target.stride(0), scales.data_ptr(),
            *scales.stride(), *source.shape, nonfinite.data_ptr(), **constants,
        )  # fmt: skip


def constants_of(
    source: torch.Tensor, target: torch.Tensor, is_row: bool, rounding: dict[str, bool]
) -> dict[str, Any]:
    """Constants and launch options of `matrix_cast_kernel`, by 128×128 blocks or each row by itself."""
    (rows, cols), is_through = source.shape, target.dtype == torch.bfloat16
    aligned = _aligned(source, target)
    is_ragged, align = bool(rows % BLOCK or cols % BLOCK), aligned["TARGET_ALIGN"]
    chunk = CHUNKS[bisect_left(CHUNKS, cols)] if is_row else 0
    options = cast_options(chunk, is_ragged, align, is_through)
    packed = {"PACKED": rounding["ROUND"] and has_packed_kernels(source.device)}
    return {**aligned, **options, **rounding, **packed, "THROUGH": is_through}


def copy_into(source: torch.Tensor, target: torch.Tensor, bad: torch.Tensor) -> None:
    """As `cast.copy_finite_into` of what a `Piece` of COPY may be; `bad`, bool [rows], says which rows stayed."""
    rows, cols = source.shape
    chunk = CHUNKS[bisect_left(CHUNKS, cols)]
    constants = {"TO": DTYPES[target.dtype], "PACKED": has_packed_kernels(source.device)}
    constants |= {"CHUNK": chunk, "num_warps": row_warps(chunk), **_aligned(source, target)}
    with torch.cuda.device_of(source):
        matrix_copy_kernel[(rows,)](
            source.data_ptr(), source.stride(0), target.data_ptr(), target.stride(0), cols,
            bad.data_ptr(), **constants,
        )  # fmt: skip


def _aligned(source: torch.Tensor, target: torch.Tensor) -> dict[str, int]:
    """The kind of the source, and bytes that divide its address and rows; of the target, its columns too."""
    size, to_size = source.element_size(), target.element_size()
    divides = source.data_ptr() | source.stride(0) * size | WIDEST
    to_divides = target.data_ptr() | (target.stride(0) | source.shape[1]) * to_size | WIDEST
    aligned = {"SOURCE_ALIGN": divides & -divides, "TARGET_ALIGN": to_divides & -to_divides}
    return aligned | {"KIND": DTYPES[source.dtype]}
