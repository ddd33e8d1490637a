"""The casts of a `CastTable`, from memory to memory: of 128×128 blocks, and of rows."""

from __future__ import annotations

import triton
import triton.language as tl

from .arithmetic import (
    FP32,
    amax_to_scale_inv,
    codes_of,
    fp32_bits,
    packed_bf16,
    scale_of,
)
from .pieces import (
    COLS,
    FLAG_COLS,
    FLAGS,
    ROWS,
    SCALES,
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
    scales = tl.load(row + SCALES).to(tl.pointer_type(tl.float32))
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
    ONE_CHUNK: tl.constexpr,
    KIND: tl.constexpr,
    POW2: tl.constexpr,
    ROUND: tl.constexpr,
    PACKED: tl.constexpr,
):
    """One channel per program: read once if it is `ONE_CHUNK`, else twice, the second time from the cache."""
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
    if ONE_CHUNK:
        x = tl.load(source + k, mask=k < cols, other=0)
        if PACKED:
            x = packed_bf16(x, KIND)
        scale, finite = scale_of(x, KIND, POW2, ROUND, PACKED)
        tl.store(target + k, codes_of(x, scale, KIND, ROUND, PACKED), mask=(k < cols) & finite)
    else:
        largest = tl.zeros([CHUNK], tl.int32)
        for first in range(0, cols, CHUNK):
            at = first + k
            x = tl.load(source + at, mask=at < cols, other=0)
            largest = tl.maximum(largest, fp32_bits(x, KIND) & 0x7FFFFFFF)
        scale, finite = amax_to_scale_inv(tl.max(largest, axis=0), POW2, ROUND)
        for first in range(0, cols, CHUNK):
            at = first + k
            x = tl.load(source + at, mask=at < cols, other=0)
            if PACKED:
                x = packed_bf16(x, KIND)
            codes = codes_of(x, scale, KIND, ROUND, PACKED)
            tl.store(target + at, codes, mask=(at < cols) & finite)
    scales = tl.load(row + SCALES).to(tl.pointer_type(tl.float32))
    tl.store(scales + n * tl.load(row + SCALES_N), scale, mask=finite)
    raise_flag(call, flags + tl.load(row + FLAGS) + n, finite)
