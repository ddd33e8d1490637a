"""The kernels: a program per block, channel or row, of one matrix or of any piece of a `CastTable`.

Those of one matrix take its place and shape as numbers. Those of a table have the same first arguments:

- `table` int64 [pieces, columns]: the fields of `write_table.PIECE`, and the piece's first program.
- `owners` int32 [programs]: which piece.
- `call` int64 [1 + sources]: what changes from call to call. A program that raises a flag sets the
  first number, so that flags are fetched only if there is one; the others are the sources' addresses.
- `flags` int8, see `CastTable.flags_of`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..write_table import BAD_SCALE, NAN_CODE, PIECE
from .arithmetic import Constant
from .tiles import cast_tile, copy_row, known_multiple

COLUMNS = (*(PIECE.names or ()), "first")
_COLUMNS = Constant(len(COLUMNS))
_AT = {name: Constant(COLUMNS.index(name)) for name in COLUMNS}
_SOURCE, _OFFSET, _SOURCE_STRIDE = _AT["source"], _AT["source_offset"], _AT["source_stride"]
_TARGET, _TARGET_STRIDE = _AT["destination"], _AT["destination_stride"]
_SCALES, _SCALES_N, _SCALES_K = _AT["scales"], _AT["scales_stride0"], _AT["scales_stride1"]
_ROWS, _COLS, _BLOCK_N = _AT["rows"], _AT["cols"], _AT["block_n"]
_FLAGS, _FLAG_COLS, _FIRST = _AT["flags"], _AT["flag_cols"], _AT["first"]
_BAD_SCALE, _NAN_CODE = Constant(BAD_SCALE), Constant(NAN_CODE)

# Triton would compile a kernel once more where 16 divides a number, and where it is 1.
_NUMBERS = ["source", "source_stride", "target", "target_stride", "scales", "scales_n", "scales_k",
            "rows", "cols", "flags"]  # fmt: skip


@triton.jit(do_not_specialize=_NUMBERS)
def matrix_cast_kernel(
    source, source_stride, target, target_stride, scales, scales_n, scales_k, rows, cols, flags,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr, RAGGED: tl.constexpr,
    SOURCE_ALIGN: tl.constexpr, TARGET_ALIGN: tl.constexpr, THROUGH: tl.constexpr,
    KIND: tl.constexpr, POW2: tl.constexpr, ROUND: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """Block after block, columns fastest, or channel after channel (`HEIGHT` 1), cast into codes or through them."""
    block = tl.program_id(0)
    across = 1 if HEIGHT == 1 else tl.cdiv(cols, WIDTH).to(tl.int32)
    finite = cast_tile(
        source, source_stride, target, target_stride, scales, scales_n, scales_k, rows, cols,
        block // across, block % across,
        HEIGHT, WIDTH, RAGGED, SOURCE_ALIGN, TARGET_ALIGN, THROUGH, KIND, POW2, ROUND, PACKED,
    )  # fmt: skip
    if not THROUGH:
        tl.store((flags + block).to(tl.pointer_type(tl.int8)), 1 - finite.to(tl.int8))


@triton.jit(do_not_specialize=_NUMBERS)
def matrix_copy_kernel(
    source, source_stride, target, target_stride, cols, flags,
    SOURCE_ALIGN: tl.constexpr, TARGET_ALIGN: tl.constexpr, CHUNK: tl.constexpr,
    KIND: tl.constexpr, TO: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """Row after row of at most `CHUNK` columns."""
    n = tl.program_id(0)
    finite = copy_row(
        source, source_stride, target, target_stride, cols, n,
        SOURCE_ALIGN, TARGET_ALIGN, CHUNK, KIND, TO, False, PACKED,
    )  # fmt: skip
    tl.store((flags + n).to(tl.pointer_type(tl.int8)), 1 - finite.to(tl.int8))


@triton.jit
def piece_of(table, owners, call):
    """The program's row of the table, its number among the programs of that piece, and where the source lies."""
    pid = tl.program_id(0)
    row = table + tl.load(owners + pid).to(tl.int64) * _COLUMNS
    source = tl.load(call + 1 + tl.load(row + _SOURCE)) + tl.load(row + _OFFSET)
    return row, pid - tl.load(row + _FIRST).to(tl.int32), source


@triton.jit
def raise_flag(call, flag, finite):
    tl.store(flag, 1 - finite.to(tl.int8))
    tl.store(call, tl.full([], 1, tl.int64), mask=finite == 0)


@triton.jit
def table_cast_kernel(
    table, owners, call, flags,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr, RAGGED: tl.constexpr,
    SOURCE_ALIGN: tl.constexpr, TARGET_ALIGN: tl.constexpr,
    KIND: tl.constexpr, POW2: tl.constexpr, ROUND: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """As `matrix_cast_kernel`, into codes."""
    row, block, source = piece_of(table, owners, call)
    across = 1 if HEIGHT == 1 else tl.load(row + _FLAG_COLS).to(tl.int32)
    finite = cast_tile(
        source, tl.load(row + _SOURCE_STRIDE), tl.load(row + _TARGET), tl.load(row + _TARGET_STRIDE),
        tl.load(row + _SCALES), tl.load(row + _SCALES_N), tl.load(row + _SCALES_K),
        tl.load(row + _ROWS), tl.load(row + _COLS), block // across, block % across,
        HEIGHT, WIDTH, RAGGED, SOURCE_ALIGN, TARGET_ALIGN, False, KIND, POW2, ROUND, PACKED,
    )  # fmt: skip
    raise_flag(call, flags + tl.load(row + _FLAGS) + block, finite)


@triton.jit
def table_copy_kernel(
    table, owners, call, flags,
    SOURCE_ALIGN: tl.constexpr, TARGET_ALIGN: tl.constexpr, CHUNK: tl.constexpr,
    KIND: tl.constexpr, TO: tl.constexpr, SCALES: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """As `matrix_copy_kernel`; of `SCALES` too."""
    row, n, source = piece_of(table, owners, call)
    finite = copy_row(
        source, tl.load(row + _SOURCE_STRIDE),
        tl.load(row + _TARGET), tl.load(row + _TARGET_STRIDE), tl.load(row + _COLS), n,
        SOURCE_ALIGN, TARGET_ALIGN, CHUNK, KIND, TO, SCALES, PACKED,
    )  # fmt: skip
    raise_flag(call, flags + tl.load(row + _FLAGS) + n, finite)


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
    table, owners, call, flags,
    SOURCE_ALIGN: tl.constexpr, TARGET_ALIGN: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """One row of codes, copied if its scales were and none is NaN; four at a time where they are aligned so.

    `CHUNK` counts codes. Programs of the same row of blocks may set its flag while others read it: only to
    NAN_CODE, which stops no other row.
    """
    row, n, source = piece_of(table, owners, call)
    flag = flags + tl.load(row + _FLAGS) + n // tl.load(row + _BLOCK_N)
    if tl.load(flag) != _BAD_SCALE:
        WORDS: tl.constexpr = SOURCE_ALIGN >= 4 and TARGET_ALIGN >= 4
        EACH: tl.constexpr = 4 if WORDS else 1
        bits: tl.constexpr = tl.int32 if WORDS else tl.int8
        address = source + n * tl.load(row + _SOURCE_STRIDE)
        where = tl.multiple_of(address.to(tl.pointer_type(bits)), SOURCE_ALIGN)
        address = tl.load(row + _TARGET) + n * tl.load(row + _TARGET_STRIDE)
        to = tl.multiple_of(address.to(tl.pointer_type(bits)), TARGET_ALIGN)
        cols = known_multiple(tl.load(row + _COLS).to(tl.int32) // EACH, TARGET_ALIGN // EACH)
        k = tl.arange(0, CHUNK // EACH)
        x = tl.load(where + k, mask=k < cols, other=0)
        is_nan = tl.max((nan_codes(x, WORDS) != 0).to(tl.int32), axis=0) != 0
        tl.store(
            to + k, x, mask=k < known_multiple(tl.where(is_nan, 0, cols), TARGET_ALIGN // EACH)
        )
        tl.store(flag, tl.full([], _NAN_CODE, tl.int8), mask=is_nan)
        tl.store(call, tl.full([], 1, tl.int64), mask=is_nan)
