"""The kernels of a `CastTable`: a program per block or per row of any of its pieces.

All have the same first arguments:

- `table` int64 [pieces, columns]: the fields of `write_table.PIECE`, and the piece's first program.
- `owners` int32 [programs]: which piece.
- `call` int64 [1 + sources]: what changes from call to call. A program that raises a flag sets the
  first number, so that flags are fetched only if there is one; the others are the sources' addresses.
- `flags` int8, see `CastTable.flags_of`.

How a source is aligned is known of its piece (`ALIGN`, bytes that divide offset and stride) but not
of the address that comes with a call. Each launch serves the sources whose address fits
`SOURCE_ALIGN` exactly; only where one is less aligned than its pieces there is a further launch.
"""

# Triton reads these functions, not their annotations.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import triton
import triton.language as tl

from ..write_table import BAD_SCALE, NAN_CODE, PIECE
from .arithmetic import FP32
from .tiles import cast_row, cast_tile, copy_row, known_multiple

COLUMNS = (*(PIECE.names or ()), "first")
_AT = {name: tl.constexpr(COLUMNS.index(name)) for name in COLUMNS}
_COLUMNS = tl.constexpr(len(COLUMNS))
_SOURCE, _OFFSET, _SOURCE_STRIDE = _AT["source"], _AT["source_offset"], _AT["source_stride"]
_TARGET, _TARGET_STRIDE = _AT["destination"], _AT["destination_stride"]
_SCALES, _SCALES_N, _SCALES_K = _AT["scales"], _AT["scales_stride0"], _AT["scales_stride1"]
_ROWS, _COLS, _BLOCK_N = _AT["rows"], _AT["cols"], _AT["block_n"]
_FLAGS, _FLAG_COLS, _FIRST = _AT["flags"], _AT["flag_cols"], _AT["first"]
_BAD_SCALE, _NAN_CODE = tl.constexpr(BAD_SCALE), tl.constexpr(NAN_CODE)


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
def is_served(address, ALIGN: tl.constexpr, SOURCE_ALIGN: tl.constexpr):
    """Whether a launch is the one for a source at this address."""
    if SOURCE_ALIGN == ALIGN:
        served = (address & (ALIGN - 1)) == 0
    else:
        served = (address & (2 * SOURCE_ALIGN - 1)) == SOURCE_ALIGN
    return served


@triton.jit
def raise_flag(call, flag, finite):
    tl.store(flag, 1 - finite.to(tl.int8))
    tl.store(call, tl.full([], 1, tl.int64), mask=finite == 0)


@triton.jit
def table_tile_kernel(
    table,
    owners,
    call,
    flags,
    ALIGN: tl.constexpr,
    SOURCE_ALIGN: tl.constexpr,
    TARGET_ALIGN: tl.constexpr,
    RAGGED: tl.constexpr,
    KIND: tl.constexpr,
    POW2: tl.constexpr,
    ROUND: tl.constexpr,
    PACKED: tl.constexpr,
):
    """One 128×128 block per program, columns fastest."""
    row, block = piece_of(table, owners)
    address = source_address(row, call)
    if is_served(address, ALIGN, SOURCE_ALIGN):
        flag_cols = tl.load(row + _FLAG_COLS).to(tl.int32)
        block_n, block_k = block // flag_cols, block % flag_cols
        size: tl.constexpr = 4 if KIND == FP32 else 2
        source_stride, target_stride = tl.load(row + _SOURCE_STRIDE), tl.load(row + _TARGET_STRIDE)
        first_row, first_col = block_n.to(tl.int64) * 128, block_k.to(tl.int64) * 128
        rows, cols = 128, 128
        if RAGGED:
            rows = (tl.load(row + _ROWS) - first_row).to(tl.int32)
            cols = (tl.load(row + _COLS) - first_col).to(tl.int32)
        scale, finite = cast_tile(
            address + (first_row * source_stride + first_col) * size,
            source_stride,
            1,
            tl.load(row + _TARGET) + first_row * target_stride + first_col,
            target_stride,
            rows,
            cols,
            RAGGED,
            SOURCE_ALIGN,
            TARGET_ALIGN,
            KIND,
            POW2,
            ROUND,
            PACKED,
        )
        scales = tl.load(row + _SCALES).to(tl.pointer_type(tl.float32))
        at = block_n * tl.load(row + _SCALES_N) + block_k * tl.load(row + _SCALES_K)
        tl.store(scales + at, scale, mask=finite)
        raise_flag(call, flags + tl.load(row + _FLAGS) + block, finite)


@triton.jit
def table_row_kernel(
    table,
    owners,
    call,
    flags,
    ALIGN: tl.constexpr,
    SOURCE_ALIGN: tl.constexpr,
    TARGET_ALIGN: tl.constexpr,
    CHUNK: tl.constexpr,
    ONE_CHUNK: tl.constexpr,
    KIND: tl.constexpr,
    POW2: tl.constexpr,
    ROUND: tl.constexpr,
    PACKED: tl.constexpr,
):
    """One channel per program."""
    row, n = piece_of(table, owners)
    address = source_address(row, call)
    if is_served(address, ALIGN, SOURCE_ALIGN):
        size: tl.constexpr = 4 if KIND == FP32 else 2
        scale, finite = cast_row(
            address + n * tl.load(row + _SOURCE_STRIDE) * size,
            1,
            tl.load(row + _TARGET) + n * tl.load(row + _TARGET_STRIDE),
            tl.load(row + _COLS).to(tl.int32),
            CHUNK,
            ONE_CHUNK,
            SOURCE_ALIGN,
            TARGET_ALIGN,
            KIND,
            POW2,
            ROUND,
            PACKED,
        )
        scales = tl.load(row + _SCALES).to(tl.pointer_type(tl.float32))
        tl.store(scales + n * tl.load(row + _SCALES_N), scale, mask=finite)
        raise_flag(call, flags + tl.load(row + _FLAGS) + n, finite)


@triton.jit
def table_copy_kernel(
    table,
    owners,
    call,
    flags,
    ALIGN: tl.constexpr,
    SOURCE_ALIGN: tl.constexpr,
    TARGET_ALIGN: tl.constexpr,
    CHUNK: tl.constexpr,
    ONE_CHUNK: tl.constexpr,
    KIND: tl.constexpr,
    TO_FP32: tl.constexpr,
    PACKED: tl.constexpr,
):
    """One row per program of a parameter that stays in high precision."""
    row, n = piece_of(table, owners)
    address = source_address(row, call)
    if is_served(address, ALIGN, SOURCE_ALIGN):
        size: tl.constexpr = 4 if KIND == FP32 else 2
        target_size: tl.constexpr = 4 if TO_FP32 else 2
        finite = copy_row(
            address + n * tl.load(row + _SOURCE_STRIDE) * size,
            tl.load(row + _TARGET) + n * tl.load(row + _TARGET_STRIDE) * target_size,
            tl.load(row + _COLS).to(tl.int32),
            CHUNK,
            ONE_CHUNK,
            SOURCE_ALIGN,
            TARGET_ALIGN,
            KIND,
            TO_FP32,
            PACKED,
        )
        raise_flag(call, flags + tl.load(row + _FLAGS) + n, finite)


@triton.jit
def table_scales_kernel(table, owners, call, flags, CHUNK: tl.constexpr):
    """One row of scales per program, copied if all of it is positive and finite."""
    row, at = piece_of(table, owners)
    n = at.to(tl.int64)
    cols = tl.load(row + _COLS).to(tl.int32)
    source = source_address(row, call).to(tl.pointer_type(tl.int32))
    source += n * tl.load(row + _SOURCE_STRIDE)
    target = tl.load(row + _TARGET).to(tl.pointer_type(tl.int32))
    target += n * tl.load(row + _TARGET_STRIDE)
    k = tl.arange(0, CHUNK)
    bad = tl.zeros([CHUNK], tl.int32)
    for first in range(0, cols, CHUNK):
        bits = tl.load(source + first + k, mask=first + k < cols, other=1)
        bad |= ((bits <= 0) | (bits >= 0x7F800000)).to(tl.int32)
    good = tl.max(bad, axis=0) == 0
    for first in range(0, cols, CHUNK):
        inside = first + k < cols
        tl.store(target + first + k, tl.load(source + first + k, mask=inside), mask=inside & good)
    raise_flag(call, flags + tl.load(row + _FLAGS) + n, tl.where(good, 1, 1 - _BAD_SCALE))


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
    ALIGN: tl.constexpr,
    SOURCE_ALIGN: tl.constexpr,
    TARGET_ALIGN: tl.constexpr,
    CHUNK: tl.constexpr,
    ONE_CHUNK: tl.constexpr,
):
    """One row of codes per program, copied if its scales were and none is NaN; four codes at a time
    where they are aligned so. `CHUNK` counts codes.

    Programs of the same row of blocks may set its flag while others read it: only to NAN_CODE, which
    stops no other row.
    """
    row, at = piece_of(table, owners)
    address = source_address(row, call)
    flag = flags + tl.load(row + _FLAGS) + at // tl.load(row + _BLOCK_N)
    if is_served(address, ALIGN, SOURCE_ALIGN) & (tl.load(flag) != _BAD_SCALE):
        WORDS: tl.constexpr = SOURCE_ALIGN >= 4 and TARGET_ALIGN >= 4
        STEP: tl.constexpr = CHUNK // 4 if WORDS else CHUNK
        address += at * tl.load(row + _SOURCE_STRIDE)
        target_address = tl.load(row + _TARGET) + at * tl.load(row + _TARGET_STRIDE)
        cols = tl.load(row + _COLS).to(tl.int32)
        if WORDS:
            source = tl.multiple_of(address.to(tl.pointer_type(tl.int32)), SOURCE_ALIGN)
            target = tl.multiple_of(target_address.to(tl.pointer_type(tl.int32)), TARGET_ALIGN)
            cols = known_multiple(cols // 4, TARGET_ALIGN // 4)
        else:
            source = address.to(tl.pointer_type(tl.int8))
            target = target_address.to(tl.pointer_type(tl.int8))
        k = tl.arange(0, STEP)
        if ONE_CHUNK:
            x = tl.load(source + k, mask=k < cols, other=0)
            is_nan = tl.max((nan_codes(x, WORDS) != 0).to(tl.int32), axis=0) != 0
            tl.store(target + k, x, mask=(k < cols) & (is_nan == 0))
        else:
            nan = tl.zeros([STEP], tl.int32)
            for first in range(0, cols, STEP):
                at_k = first + k
                nan |= nan_codes(tl.load(source + at_k, mask=at_k < cols, other=0), WORDS)
            is_nan = tl.max((nan != 0).to(tl.int32), axis=0) != 0
            for first in range(0, cols, STEP):
                at_k = first + k
                x = tl.load(source + at_k, mask=at_k < cols, other=0)
                tl.store(target + at_k, x, mask=(at_k < cols) & (is_nan == 0))
        tl.store(flag, tl.full([], _NAN_CODE, tl.int8), mask=is_nan)
        tl.store(call, tl.full([], 1, tl.int64), mask=is_nan)
