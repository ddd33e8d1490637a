"""The kernels of a `CastTable`: casts of 128×128 blocks and of rows; copies, a row per program, of what stays in
high precision, and of codes and their scales.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..write_table import BAD_SCALE, NAN_CODE
from .pieces import (
    BLOCK_N,
    COLS,
    FLAG_COLS,
    FLAGS,
    ROWS,
    SCALES_AT,
    SCALES_K,
    SCALES_N,
    SOURCE_STRIDE,
    TARGET,
    TARGET_STRIDE,
    piece_of,
    raise_flag,
    source_address,
)
from .tiles import cast_row, cast_tile, copy_row, known_multiple

_BAD_SCALE, _NAN_CODE = tl.constexpr(BAD_SCALE), tl.constexpr(NAN_CODE)


@triton.jit
def table_tile_kernel(
    table, owners, call, flags,
    SOURCE_ALIGN: tl.constexpr, TARGET_ALIGN: tl.constexpr, RAGGED: tl.constexpr,
    KIND: tl.constexpr, POW2: tl.constexpr, ROUND: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """One 128×128 block per program, columns fastest; its codes and scale are written if all is finite."""
    row, block = piece_of(table, owners)
    across = tl.load(row + FLAG_COLS).to(tl.int32)
    finite = cast_tile(
        source_address(row, call), tl.load(row + SOURCE_STRIDE),
        tl.load(row + TARGET), tl.load(row + TARGET_STRIDE),
        tl.load(row + SCALES_AT), tl.load(row + SCALES_N), tl.load(row + SCALES_K),
        tl.load(row + ROWS), tl.load(row + COLS), block // across, block % across,
        SOURCE_ALIGN, TARGET_ALIGN, RAGGED, KIND, POW2, ROUND, PACKED,
    )  # fmt: skip
    raise_flag(call, flags + tl.load(row + FLAGS) + block, finite)


@triton.jit
def table_row_kernel(
    table, owners, call, flags,
    SOURCE_ALIGN: tl.constexpr, TARGET_ALIGN: tl.constexpr, CHUNK: tl.constexpr,
    KIND: tl.constexpr, POW2: tl.constexpr, ROUND: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """One channel of at most `CHUNK` columns per program."""
    row, n = piece_of(table, owners)
    finite = cast_row(
        source_address(row, call), tl.load(row + SOURCE_STRIDE),
        tl.load(row + TARGET), tl.load(row + TARGET_STRIDE),
        tl.load(row + SCALES_AT), tl.load(row + SCALES_N), tl.load(row + COLS), n,
        SOURCE_ALIGN, TARGET_ALIGN, CHUNK, KIND, POW2, ROUND, PACKED,
    )  # fmt: skip
    raise_flag(call, flags + tl.load(row + FLAGS) + n, finite)


@triton.jit
def table_copy_kernel(
    table, owners, call, flags,
    SOURCE_ALIGN: tl.constexpr, TARGET_ALIGN: tl.constexpr, CHUNK: tl.constexpr,
    KIND: tl.constexpr, TO: tl.constexpr, SCALES: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """One row of at most `CHUNK` columns per program, copied if all of it stays finite."""
    row, n = piece_of(table, owners)
    finite = copy_row(
        source_address(row, call), tl.load(row + SOURCE_STRIDE),
        tl.load(row + TARGET), tl.load(row + TARGET_STRIDE), tl.load(row + COLS), n,
        SOURCE_ALIGN, TARGET_ALIGN, CHUNK, KIND, TO, SCALES, PACKED,
    )  # fmt: skip
    raise_flag(call, flags + tl.load(row + FLAGS) + n, finite)


@triton.jit
def nan_codes(x, WORDS: tl.constexpr):
    """Not zero where a word of four codes, or a code, has a NaN (0x7F or 0xFF)."""
    if WORDS:  # noqa: SIM108 of the magnitudes 0 to 0x7F, only the last carries into the sign's place
        nan = ((x & 0x7F7F7F7F) + 0x01010101) & -0x7F7F7F80
    else:
        nan = ((x & 0x7F) == 0x7F).to(tl.int32)
    return nan


@triton.jit
def table_codes_kernel(
    table,
    owners,
    call,
    flags,
    SOURCE_ALIGN: tl.constexpr,
    TARGET_ALIGN: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """One row of codes, copied if its scales were and none is NaN; four at a time where they are aligned so.

    `CHUNK` counts codes. Programs of the same row of blocks may set its flag while others read it: only to
    NAN_CODE, which stops no other row.
    """
    row, at = piece_of(table, owners)
    address = source_address(row, call)
    flag = flags + tl.load(row + FLAGS) + at // tl.load(row + BLOCK_N)
    if tl.load(flag) != _BAD_SCALE:
        WORDS: tl.constexpr = SOURCE_ALIGN >= 4 and TARGET_ALIGN >= 4
        STEP: tl.constexpr = CHUNK // 4 if WORDS else CHUNK
        address += at * tl.load(row + SOURCE_STRIDE)
        target_address = tl.load(row + TARGET) + at * tl.load(row + TARGET_STRIDE)
        cols = tl.load(row + COLS).to(tl.int32)
        if WORDS:
            source = tl.multiple_of(address.to(tl.pointer_type(tl.int32)), SOURCE_ALIGN)
            target = tl.multiple_of(target_address.to(tl.pointer_type(tl.int32)), TARGET_ALIGN)
            cols = known_multiple(cols // 4, TARGET_ALIGN // 4)
        else:
            source = address.to(tl.pointer_type(tl.int8))
            target = target_address.to(tl.pointer_type(tl.int8))
        k = tl.arange(0, STEP)
        x = tl.load(source + k, mask=k < cols, other=0)
        is_nan = tl.max((nan_codes(x, WORDS) != 0).to(tl.int32), axis=0) != 0
        tl.store(target + k, x, mask=(k < cols) & (is_nan == 0))
        tl.store(flag, tl.full([], _NAN_CODE, tl.int8), mask=is_nan)
        tl.store(call, tl.full([], 1, tl.int64), mask=is_nan)
