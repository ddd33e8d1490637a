"""`numerics.linear` on a GPU.

The product is for few tokens, where the memory is the limit. The weight's rows lie along the tensor cores' long side,
tokens along the short one, so that a small batch fills a tile. The warps of a program share the columns of a few rows,
each adds up its part, and the parts are added in order at the end. So one launch reads each code once, in 16 bytes a
thread, and nothing is allocated but the output; beyond `TOKENS` it reads them again.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..write_table import DTYPES
from .arithmetic import BF16, amax_to_scale_inv, fp32_bits, lifted_quotient, round_bits_to_bf16

TOKENS = 16  # of a tile: the short side of a tensor core
_COLUMNS = 64  # of a warp at a time
_MANY_ROWS = 64 * 132  # a tile of 64 for each multiprocessor of an H100 or H200
_ELEMENTS = 2048  # of a program that doubles rows, where they are shorter


@triton.jit(do_not_specialize=["m"])
def linear_kernel(
    x, codes, weight_scale, output, m, n, k, x_stride, codes_stride, scale_stride,
    TOKENS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, PARTS: tl.constexpr,
    BLOCKWISE: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """One tile of `ROWS` of the weight and `TOKENS`; `PARTS * COLUMNS` columns of both at a time, if `WHOLE` no rest."""
    tiles = tl.cdiv(m, TOKENS)
    first_row = tl.program_id(0) // tiles * ROWS
    first_token = tl.program_id(0) % tiles * TOKENS
    row, token = tl.arange(0, ROWS), tl.arange(0, TOKENS)
    is_row, is_token = row < n - first_row, token < m - first_token
    # Behind the last row it is read again, and not stored: no load of codes needs a mask for it.
    near = tl.minimum(row, n - first_row - 1)
    codes += first_row.to(tl.int64) * codes_stride
    x += first_token.to(tl.int64) * x_stride
    if BLOCKWISE:
        weight_scale += first_row // 128 * scale_stride
    part, column = tl.arange(0, PARTS), tl.arange(0, COLUMNS)
    codes_column = part[:, None, None] * COLUMNS + column[None, None, :]
    x_column = part[:, None, None] * COLUMNS + column[None, :, None]
    codes_at = near[None, :, None] * codes_stride + codes_column
    x_at = token[None, None, :] * x_stride + x_column
    is_sent = is_token[None, None, :]
    total = tl.zeros([PARTS, ROWS, TOKENS], tl.float32)
    for start in tl.range(0, k, PARTS * COLUMNS, num_stages=3):
        if WHOLE:
            some_codes = tl.load(codes + start + codes_at)
            some_x = tl.load(x + start + x_at, mask=is_sent, other=0.0)
        else:
            some_codes = tl.load(codes + start + codes_at, mask=codes_column < k - start, other=0)
            is_there = is_sent & (x_column < k - start)
            some_x = tl.load(x + start + x_at, mask=is_there, other=0.0)
        # FP16 has every value of e4m3; to BF16 by way of FP32, two codes are converted at once.
        values = some_codes.to(tl.float8e4nv, bitcast=True).to(tl.float16)
        if some_x.dtype != tl.float16:
            values = values.to(tl.float32).to(some_x.dtype)
        product = tl.dot(values, some_x)
        if BLOCKWISE:
            at = start + part * COLUMNS
            product *= tl.load(weight_scale + at // 128, mask=at < k, other=0.0)[:, None, None]
        total += product
    total = tl.sum(total, axis=0)
    if not BLOCKWISE:
        total *= tl.load(weight_scale + (first_row + near) * scale_stride)[:, None]
    output += first_token.to(tl.int64) * n + first_row
    where = output + token[None, :] * n + row[:, None]
    tl.store(where, total.to(output.dtype.element_ty), mask=is_row[:, None] & is_token[None, :])


def tile_of(n: int, *, is_aligned: bool = True) -> dict[str, int]:
    """Sizes and launch options of `linear_kernel` for `n` rows, which are of a multiple of 16 columns or are read byte by
    byte.

    The more rows in a tile, the less often the tokens are read; but every multiprocessor has to have
    a tile, and warps enough to hide the memory's latency: of one program, or of four.
    """
    if not is_aligned:  # an address for each code: with more of them registers spill
        return {"TOKENS": TOKENS, "ROWS": 32, "COLUMNS": 32, "PARTS": 8, "num_warps": 8}
    rows, parts = (64, 4) if n >= _MANY_ROWS else (32, 8)
    tile = {"TOKENS": TOKENS, "ROWS": rows, "COLUMNS": _COLUMNS, "PARTS": parts}
    return {**tile, "num_warps": parts, "maxnreg": 128}  # for four such programs at once


def linear(x: torch.Tensor, codes: torch.Tensor, weight_scale: torch.Tensor) -> torch.Tensor:
    """As `numerics.linear`, for tensors of one GPU; what is launched depends on shapes alone."""
    x = x if x.stride(1) == 1 else x.contiguous()
    (m, k), n = x.shape, codes.shape[0]
    output = x.new_empty(m, n)
    if m:
        tile = tile_of(n, is_aligned=k % 16 == 0)
        programs = triton.cdiv(m, TOKENS) * triton.cdiv(n, tile["ROWS"])
        with torch.cuda.device_of(x):  # on which Triton launches
            linear_kernel[(programs,)](
                x, codes.detach().view(torch.int8), weight_scale.detach(), output, m, n, k,
                x.stride(0), codes.stride(0), weight_scale.stride(0), BLOCKWISE=weight_scale.shape != (n, 1),
                WHOLE=k % (tile["PARTS"] * tile["COLUMNS"]) == 0, **tile,
            )  # fmt: skip
    return output


@triton.jit(do_not_specialize=["m"])
def doubled_kernel(
    x, out, m, k, x_stride, HEIGHT: tl.constexpr, WIDTH: tl.constexpr,
    KIND: tl.constexpr, POW2: tl.constexpr,
):  # fmt: skip
    """One group of `WIDTH` columns of `HEIGHT` rows."""
    groups = tl.cdiv(k, WIDTH)
    first_row, first = tl.program_id(0) // groups * HEIGHT, tl.program_id(0) % groups * WIDTH
    # Behind the last row it is read and written again, with the same values.
    row = first_row.to(tl.int64) + tl.minimum(tl.arange(0, HEIGHT), m - first_row - 1)
    column = first + tl.arange(0, WIDTH)
    inside, where = (column < k)[None, :], out + row[:, None] * k + column[None, :]
    some = tl.load(x + row[:, None] * x_stride + column[None, :], mask=inside, other=0)
    bits = fp32_bits(some, KIND)
    scale, _ = amax_to_scale_inv(tl.max(bits & 0x7FFFFFFF, axis=1)[:, None], POW2, False)
    lifted, lift = lifted_quotient(bits, scale)
    # With 20 bits of the scale a product with a code is exact, so that no GPU may fuse it into other bits.
    scale = (scale.to(tl.int32, bitcast=True) & -16).to(tl.float32, bitcast=True)
    held = ((lifted - lift.to(tl.float32, bitcast=True)) * scale).to(tl.int32, bitcast=True)
    held = (held | (bits & -2147483648)).to(tl.float32, bitcast=True)
    left = bits.to(tl.float32, bitcast=True) - held
    if KIND == BF16:  # of what lies at codes, how a tie is rounded makes no difference
        near = ((held.to(tl.int32, bitcast=True) + 0x8000) >> 16).to(tl.int16)
        left = (round_bits_to_bf16(left.to(tl.int32, bitcast=True)) >> 16).to(tl.int16)
    else:
        near = held.to(tl.float16).to(tl.int16, bitcast=True)
        left = left.to(tl.float16).to(tl.int16, bitcast=True)
    tl.store(where, near, mask=inside)
    tl.store(where + m.to(tl.int64) * k, left, mask=inside)


def doubled_tile(group: int) -> dict[str, int]:
    """Sizes and launch options of `doubled_kernel`: a thread has 16 elements, or 32 of long rows."""
    width = triton.next_power_of_2(group)
    height = max(1, _ELEMENTS // width)
    return {"HEIGHT": height, "WIDTH": width, "num_warps": max(4, min(32, width // 512))}


def doubled(x: torch.Tensor, group: int, pow2: bool) -> torch.Tensor:
    """As `numerics.linear.doubled`, for a tensor of one GPU."""
    x = x if x.stride(1) == 1 else x.contiguous()
    (m, k), tile = x.shape, doubled_tile(group)
    out = x.new_empty(2 * m, k)
    if m:
        programs = triton.cdiv(m, tile["HEIGHT"]) * triton.cdiv(k, tile["WIDTH"])
        with torch.cuda.device_of(x):  # on which Triton launches
            doubled_kernel[(programs,)](
                x.view(torch.int16), out.view(torch.int16), m, k, x.stride(0),
                KIND=DTYPES[x.dtype], POW2=pow2, **tile,
            )  # fmt: skip
    return out
