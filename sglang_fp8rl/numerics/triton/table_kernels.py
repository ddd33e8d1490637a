"""The kernels of a `CastTable`, from memory to memory: casts of 128×128 blocks and of rows; copies, a row per
program, of what stays in high precision, and of codes and their scales.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..write_table import BAD_SCALE, NAN_CODE
from .arithmetic import (
    BF16,
    FP32,
    codes_of,
    fp32_bits,
    packed_bf16,
    packed_largest_magnitude,
    round_bits_to_bf16,
    scale_of,
)
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
    known_multiple,
    piece_of,
    raise_flag,
    source_address,
)

_BAD_SCALE, _NAN_CODE = tl.constexpr(BAD_SCALE), tl.constexpr(NAN_CODE)


@triton.jit
def table_tile_kernel(
    table,
    owners,
    call,
    flags,
    SOURCE_ALIGN: tl.constexpr,
    TARGET_ALIGN: tl.constexpr,
    RAGGED: tl.constexpr,
    KIND: tl.constexpr,
    POW2: tl.constexpr,
    ROUND: tl.constexpr,
    PACKED: tl.constexpr,
):
    """One 128×128 block per program, columns fastest; its codes and scale are written if all is finite."""
    row, block = piece_of(table, owners)
    address = source_address(row, call)
    flag_cols = tl.load(row + FLAG_COLS).to(tl.int32)
    block_n, block_k = block // flag_cols, block % flag_cols
    size: tl.constexpr = 4 if KIND == FP32 else 2
    bits: tl.constexpr = tl.int32 if KIND == FP32 else tl.int16
    source_stride, target_stride = tl.load(row + SOURCE_STRIDE), tl.load(row + TARGET_STRIDE)
    first_row, first_col = block_n.to(tl.int64) * 128, block_k.to(tl.int64) * 128
    if RAGGED:
        rows = (tl.load(row + ROWS) - first_row).to(tl.int32)
        cols = (tl.load(row + COLS) - first_col).to(tl.int32)
    address += (first_row * source_stride + first_col) * size
    source = tl.multiple_of(address.to(tl.pointer_type(bits)), SOURCE_ALIGN)
    source_stride = known_multiple(source_stride, SOURCE_ALIGN // size)
    target = tl.load(row + TARGET) + first_row * target_stride + first_col
    target = tl.multiple_of(target.to(tl.pointer_type(tl.int8)), TARGET_ALIGN)
    target_stride = known_multiple(target_stride, TARGET_ALIGN)
    n, k = tl.arange(0, 128), tl.arange(0, 128)
    where = source + (n.to(tl.int64)[:, None] * source_stride + k[None, :])
    if RAGGED:
        inside = (n < rows)[:, None] & (k < known_multiple(cols, TARGET_ALIGN))[None, :]
        x = tl.load(where, mask=inside, other=0)
    else:
        x = tl.load(where)
    if PACKED:
        x = packed_bf16(x, KIND)
    scale, finite = scale_of(x, KIND, POW2, ROUND, PACKED)
    codes = codes_of(x, scale, KIND, ROUND, PACKED)
    to = target + (n.to(tl.int64)[:, None] * target_stride + k[None, :])
    if finite:
        if RAGGED:
            tl.store(to, codes, mask=inside)
        else:
            tl.store(to, codes)
    scales = tl.load(row + SCALES_AT).to(tl.pointer_type(tl.float32))
    at = block_n * tl.load(row + SCALES_N) + block_k * tl.load(row + SCALES_K)
    tl.store(scales + at, scale, mask=finite)
    raise_flag(call, flags + tl.load(row + FLAGS) + block, finite)


@triton.jit
def table_row_kernel(
    table,
    owners,
    call,
    flags,
    SOURCE_ALIGN: tl.constexpr,
    TARGET_ALIGN: tl.constexpr,
    CHUNK: tl.constexpr,
    KIND: tl.constexpr,
    POW2: tl.constexpr,
    ROUND: tl.constexpr,
    PACKED: tl.constexpr,
):
    """One channel of at most `CHUNK` columns per program."""
    row, n = piece_of(table, owners)
    address = source_address(row, call)
    size: tl.constexpr = 4 if KIND == FP32 else 2
    bits: tl.constexpr = tl.int32 if KIND == FP32 else tl.int16
    address += n * tl.load(row + SOURCE_STRIDE) * size
    source = tl.multiple_of(address.to(tl.pointer_type(bits)), SOURCE_ALIGN)
    target = tl.load(row + TARGET) + n * tl.load(row + TARGET_STRIDE)
    target = tl.multiple_of(target.to(tl.pointer_type(tl.int8)), TARGET_ALIGN)
    cols = known_multiple(tl.load(row + COLS).to(tl.int32), TARGET_ALIGN)
    k = tl.arange(0, CHUNK)
    x = tl.load(source + k, mask=k < cols, other=0)
    if PACKED:
        x = packed_bf16(x, KIND)
    scale, finite = scale_of(x, KIND, POW2, ROUND, PACKED)
    tl.store(target + k, codes_of(x, scale, KIND, ROUND, PACKED), mask=(k < cols) & finite)
    scales = tl.load(row + SCALES_AT).to(tl.pointer_type(tl.float32))
    tl.store(scales + n * tl.load(row + SCALES_N), scale, mask=finite)
    raise_flag(call, flags + tl.load(row + FLAGS) + n, finite)


@triton.jit
def table_copy_kernel(
    table,
    owners,
    call,
    flags,
    SOURCE_ALIGN: tl.constexpr,
    TARGET_ALIGN: tl.constexpr,
    CHUNK: tl.constexpr,
    KIND: tl.constexpr,
    TO_FP32: tl.constexpr,
    SCALES: tl.constexpr,
    PACKED: tl.constexpr,
):
    """One row of at most `CHUNK` columns to FP32 or BF16, copied if all of it stays finite; of `SCALES`, if all
    is positive too."""
    row, n = piece_of(table, owners)
    address = source_address(row, call)
    # Of FP32 bits: Inf, or the smallest number that is Inf in BF16.
    LIMIT: tl.constexpr = 0x7F7F8000 if KIND == FP32 and not TO_FP32 else 0x7F800000
    size: tl.constexpr = 4 if KIND == FP32 else 2
    bits: tl.constexpr = tl.int32 if KIND == FP32 else tl.int16
    target_size: tl.constexpr = 4 if TO_FP32 else 2
    target_bits: tl.constexpr = tl.int32 if TO_FP32 else tl.int16
    address += n * tl.load(row + SOURCE_STRIDE) * size
    source = tl.multiple_of(address.to(tl.pointer_type(bits)), SOURCE_ALIGN)
    target = tl.load(row + TARGET) + n * tl.load(row + TARGET_STRIDE) * target_size
    target = tl.multiple_of(target.to(tl.pointer_type(target_bits)), TARGET_ALIGN)
    cols = known_multiple(tl.load(row + COLS).to(tl.int32), TARGET_ALIGN // target_size)
    k = tl.arange(0, CHUNK)
    x = tl.load(source + k, mask=k < cols, other=0)
    if PACKED and KIND == BF16:
        finite = packed_largest_magnitude(x) < LIMIT
    else:
        finite = tl.max(magnitudes(x, k < cols, KIND, SCALES), axis=0) < LIMIT
    tl.store(target + k, copied(x, KIND, TO_FP32, PACKED), mask=(k < cols) & finite)
    raise_flag(call, flags + tl.load(row + FLAGS) + n, finite)


@triton.jit
def magnitudes(x, inside, KIND: tl.constexpr, SCALES: tl.constexpr):
    """FP32 bits of |x|; what is no scale counts as infinite."""
    bits = tl.where(inside & (x <= 0), 0x7F800000, x) if SCALES else fp32_bits(x, KIND)
    return bits & 0x7FFFFFFF


@triton.jit
def copied(x, KIND: tl.constexpr, TO_FP32: tl.constexpr, PACKED: tl.constexpr):
    """Bits of the destination from bits of the source."""
    if TO_FP32:
        bits = fp32_bits(x, KIND)
    elif KIND == BF16:
        bits = x
    elif PACKED:
        bits = packed_bf16(x, KIND)
    else:
        bits = (round_bits_to_bf16(fp32_bits(x, KIND)) >> 16).to(tl.int16)
    return bits


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
