"""What the kernels of a `CastTable` read of it: a program per block or per row of any of its pieces.

All have the same first arguments:

- `table` int64 [pieces, columns]: the fields of `write_table.PIECE`, and the piece's first program.
- `owners` int32 [programs]: which piece.
- `call` int64 [1 + sources]: what changes from call to call. A program that raises a flag sets the
  first number, so that flags are fetched only if there is one; the others are the sources' addresses.
- `flags` int8, see `CastTable.flags_of`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..write_table import PIECE

COLUMNS = (*(PIECE.names or ()), "first")
_AT = {name: tl.constexpr(COLUMNS.index(name)) for name in COLUMNS}
_COLUMNS = tl.constexpr(len(COLUMNS))
_SOURCE, _OFFSET, _FIRST = _AT["source"], _AT["source_offset"], _AT["first"]
SOURCE_STRIDE = _AT["source_stride"]
TARGET, TARGET_STRIDE = _AT["destination"], _AT["destination_stride"]
SCALES_AT, SCALES_N, SCALES_K = _AT["scales"], _AT["scales_stride0"], _AT["scales_stride1"]
ROWS, COLS, BLOCK_N = _AT["rows"], _AT["cols"], _AT["block_n"]
FLAGS, FLAG_COLS = _AT["flags"], _AT["flag_cols"]


@triton.jit
def piece_of(table, owners):
    """The program's row of the table, and its number among the programs of that piece."""
    pid = tl.program_id(0)
    row = table + tl.load(owners + pid).to(tl.int64) * _COLUMNS
    return row, pid - tl.load(row + _FIRST).to(tl.int32)


@triton.jit
def source_address(row, call):
    return tl.load(call + 1 + tl.load(row + _SOURCE)) + tl.load(row + _OFFSET)


@triton.jit
def raise_flag(call, flag, finite):
    tl.store(flag, 1 - finite.to(tl.int8))
    tl.store(call, tl.full([], 1, tl.int64), mask=finite == 0)
