"""Casts and copies of one matrix on a GPU: one launch, its place and shape given as plain numbers.

Nothing is uploaded and nothing waits, so that a model's loaders, which bring one matrix after the other, are
not held up, and a CUDA graph may capture it.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import Any

import torch
import triton
import triton.language as tl

from ..grid import ceil_div
from ..write_table import DTYPES, LONGEST_ROW
from .arithmetic import has_packed_kernels
from .tiles import cast_row, cast_tile, copy_row

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


def tile_options(target_align: int) -> dict[str, Any]:
    """Launch options of a program per tile, by the bytes that divide its rows of codes."""
    options = {"num_warps": _TILE_WARPS}
    if target_align >= _TILE_REGISTERS_FROM:
        options["maxnreg"] = _TILE_REGISTERS
    return options


def cast_matrix(
    source: torch.Tensor,
    codes: torch.Tensor,
    scales: torch.Tensor,
    nonfinite: torch.Tensor,
    is_row: bool,
    rounding: dict[str, bool],
) -> None:
    """As `reference.cast_into`, of contiguous rows into codes; by 128×128 blocks, or each row by itself.

    Args:
        rounding: `POW2` and `ROUND` of the kernels.
    """
    rows, cols = source.shape
    constants = rounding | {"PACKED": rounding["ROUND"] and has_packed_kernels(source.device)}
    (scales_n, scales_k), flags = scales.stride(), nonfinite.data_ptr()
    if is_row:
        rest = (scales.data_ptr(), scales_n, cols, flags)
        return _launch(matrix_row_kernel, rows, source, codes, rest, constants)
    blocks = ceil_div(rows, BLOCK) * ceil_div(cols, BLOCK)
    constants["RAGGED"] = bool(rows % BLOCK or cols % BLOCK)
    shape = (scales.data_ptr(), scales_n, scales_k, rows, cols, flags)
    return _launch(matrix_tile_kernel, blocks, source, codes, shape, constants)


def copy_into(source: torch.Tensor, target: torch.Tensor, bad: torch.Tensor) -> None:
    """As `cast.copy_finite_into` of what a `Piece` of COPY may be; `bad`, bool [rows], says which rows stayed."""
    rows, cols = source.shape
    constants = {"TO": int(DTYPES[target.dtype]), "PACKED": has_packed_kernels(source.device)}
    _launch(matrix_copy_kernel, rows, source, target, (cols, bad.data_ptr()), constants)


def _launch(
    kernel: Any,
    programs: int,
    source: torch.Tensor,
    target: torch.Tensor,
    rest: tuple[int, ...],
    constants: dict[str, Any],
) -> None:
    """A program for each block or row; `rest` are the kernel's numbers behind those of source and target."""
    cols, size, to_size = source.shape[1], source.element_size(), target.element_size()
    places = (source.data_ptr(), source.stride(0), target.data_ptr(), target.stride(0))
    source_bits = places[0] | places[1] * size | WIDEST
    target_bits = places[2] | (places[3] | cols) * to_size | WIDEST
    target_align = target_bits & -target_bits
    if kernel is matrix_tile_kernel:
        options = tile_options(target_align)
    else:
        chunk = CHUNKS[bisect_left(CHUNKS, cols)]
        options = {"CHUNK": chunk, "num_warps": row_warps(chunk)}
    options |= {"SOURCE_ALIGN": source_bits & -source_bits, "TARGET_ALIGN": target_align}
    with torch.cuda.device_of(source):  # on which Triton launches
        kernel[(programs,)](*places, *rest, KIND=int(DTYPES[source.dtype]), **constants, **options)


# Triton would compile a kernel once more where 16 divides a number, and where it is 1.
_NUMBERS = ["source", "source_stride", "target", "target_stride", "scales", "scales_n", "scales_k",
            "rows", "cols", "flags"]  # fmt: skip


@triton.jit(do_not_specialize=_NUMBERS)
def matrix_tile_kernel(
    source, source_stride, target, target_stride, scales, scales_n, scales_k, rows, cols, flags,
    SOURCE_ALIGN: tl.constexpr, TARGET_ALIGN: tl.constexpr, RAGGED: tl.constexpr,
    KIND: tl.constexpr, POW2: tl.constexpr, ROUND: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """One 128×128 block per program, columns fastest."""
    block, across = tl.program_id(0), tl.cdiv(cols, 128).to(tl.int32)
    finite = cast_tile(
        source, source_stride, target, target_stride, scales, scales_n, scales_k, rows, cols,
        block // across, block % across,
        SOURCE_ALIGN, TARGET_ALIGN, RAGGED, KIND, POW2, ROUND, PACKED,
    )  # fmt: skip
    say_whether(flags, block, finite)


@triton.jit(do_not_specialize=_NUMBERS)
def matrix_row_kernel(
    source, source_stride, target, target_stride, scales, scales_n, cols, flags,
    SOURCE_ALIGN: tl.constexpr, TARGET_ALIGN: tl.constexpr, CHUNK: tl.constexpr,
    KIND: tl.constexpr, POW2: tl.constexpr, ROUND: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """One channel of at most `CHUNK` columns per program."""
    n = tl.program_id(0)
    finite = cast_row(
        source, source_stride, target, target_stride, scales, scales_n, cols, n,
        SOURCE_ALIGN, TARGET_ALIGN, CHUNK, KIND, POW2, ROUND, PACKED,
    )  # fmt: skip
    say_whether(flags, n, finite)


@triton.jit(do_not_specialize=_NUMBERS)
def matrix_copy_kernel(
    source, source_stride, target, target_stride, cols, flags,
    SOURCE_ALIGN: tl.constexpr, TARGET_ALIGN: tl.constexpr, CHUNK: tl.constexpr,
    KIND: tl.constexpr, TO: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """One row of at most `CHUNK` columns per program."""
    n = tl.program_id(0)
    finite = copy_row(
        source, source_stride, target, target_stride, cols, n,
        SOURCE_ALIGN, TARGET_ALIGN, CHUNK, KIND, TO, False, PACKED,
    )  # fmt: skip
    say_whether(flags, n, finite)


@triton.jit
def say_whether(flags, at, finite):
    tl.store((flags + at).to(tl.pointer_type(tl.int8)), 1 - finite.to(tl.int8))
