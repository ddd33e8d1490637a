"""`numerics.linear` on a GPU: codes become BF16 in registers, tensor cores multiply, FP32 adds up.

The weight's rows lie along the tensor cores' long side, tokens along the short one, so that a small batch
fills a tile. Up to 32 tokens the memory is the limit: the warps of a program share the columns of a few
rows, each adds up its part, and the parts are added in order at the end. So one launch reads each code
once, in 16 bytes a thread, and nothing is allocated but the output. From 33 tokens on tiles are square.

A tile depends on the layer's shape and on the number of tokens: so do the last bits of a sum, which the
tiles of a size give alike for a token whatever the others are.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .arithmetic import has_packed_kernels

# FP16 has every value of e4m3; from there BF16 is one step by way of FP32, two codes at a time.
_TWO = """
    cvt.rn.f16x2.e4m3x2 pair, {codes};
    mov.b32 {{low, high}}, pair;
    cvt.f32.f16 first, low;
    cvt.f32.f16 second, high;
    cvt.rn.bf16x2.f32 {values}, second, first;
"""
_REGISTERS = ".reg .b32 pair; .reg .b16 low, high, even, odd; .reg .f32 first, second;"
_TWO_CODES = tl.constexpr("{" + _REGISTERS + _TWO.format(codes="$1", values="$0") + "}")
_FOUR_CODES = tl.constexpr(
    "{" + _REGISTERS + "mov.b32 {even, odd}, $2;"
    + _TWO.format(codes="even", values="$0") + _TWO.format(codes="odd", values="$1") + "}"
)  # fmt: skip


@triton.jit
def values_of(codes, PACKED: tl.constexpr):
    """e4m3 codes (int8) as BF16, `PACKED` at a time; as FP32 with 0."""
    if PACKED == 4:
        values = tl.inline_asm_elementwise(
            _FOUR_CODES, "=r,=r,r", [codes], dtype=tl.bfloat16, is_pure=True, pack=4
        )
    elif PACKED == 2:
        values = tl.inline_asm_elementwise(
            _TWO_CODES, "=r,h", [codes], dtype=tl.bfloat16, is_pure=True, pack=2
        )
    else:
        values = codes.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    return values


@triton.jit
def with_bias(total, bias, AFTER_ROUNDING: tl.constexpr, DTYPE: tl.constexpr):
    """FP32 sums `[rows, tokens]` and the bias of each row, where `numerics.linear` says."""
    if AFTER_ROUNDING:
        total = total.to(DTYPE).to(tl.float32)
    return total + tl.load(bias)[:, None].to(tl.float32)


@triton.jit(do_not_specialize=["m"])
def linear_kernel(
    x,
    codes,
    weight_scale,
    bias,
    output,
    m,
    n,
    k,
    x_stride,
    codes_stride,
    scale_stride,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    PARTS: tl.constexpr,
    STAGES: tl.constexpr,
    BLOCKWISE: tl.constexpr,
    BIAS: tl.constexpr,
    WHOLE: tl.constexpr,
    PACKED: tl.constexpr,
):
    """One tile of `ROWS` of the weight and `TOKENS`; `PARTS * COLUMNS` columns of both at a time.

    Args:
        WHOLE: the columns are a multiple of `PARTS * COLUMNS`.
    """
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
    if PARTS == 1:
        codes_column, x_column = column[None, :], column[:, None]
        codes_at, x_at = near[:, None] * codes_stride, token[None, :] * x_stride
        is_sent = is_token[None, :]
        total = tl.zeros([ROWS, TOKENS], tl.float32)
    else:
        codes_column = part[:, None, None] * COLUMNS + column[None, None, :]
        x_column = part[:, None, None] * COLUMNS + column[None, :, None]
        codes_at, x_at = near[None, :, None] * codes_stride, token[None, None, :] * x_stride
        is_sent = is_token[None, None, :]
        total = tl.zeros([PARTS, ROWS, TOKENS], tl.float32)
    codes_at += codes_column
    x_at += x_column
    for start in tl.range(0, k, PARTS * COLUMNS, num_stages=STAGES):
        if WHOLE:
            some_codes = tl.load(codes + start + codes_at)
            some_x = tl.load(x + start + x_at, mask=is_sent, other=0.0)
        else:
            some_codes = tl.load(codes + start + codes_at, mask=codes_column < k - start, other=0)
            is_there = is_sent & (x_column < k - start)
            some_x = tl.load(x + start + x_at, mask=is_there, other=0.0)
        if PACKED == 0:
            some_x = some_x.to(tl.float32)
        # TF32 has every bit of FP16, BF16 and e4m3.
        product = tl.dot(values_of(some_codes, PACKED), some_x, input_precision="tf32")
        if BLOCKWISE:
            at = start + part * COLUMNS
            scale = tl.load(weight_scale + at // 128, mask=at < k, other=0.0)
            product *= scale[:, None] if PARTS == 1 else scale[:, None, None]
        total += product
    if PARTS > 1:
        total = tl.sum(total, axis=0)
    if not BLOCKWISE:
        total *= tl.load(weight_scale + (first_row + near) * scale_stride)[:, None]
    if BIAS:
        total = with_bias(total, bias + first_row + near, BLOCKWISE, output.dtype.element_ty)
    output += first_token.to(tl.int64) * n + first_row
    where = output + token[None, :] * n + row[:, None]
    tl.store(where, total.to(output.dtype.element_ty), mask=is_row[:, None] & is_token[None, :])


def tile_of(m: int, n: int, multiprocessors: int) -> dict[str, int]:
    """Sizes and launch options of `linear_kernel` for `m` tokens and `n` rows.

    The more rows in a tile, the less often the tokens are read; but every multiprocessor has to have
    a tile, and warps enough to hide the memory's latency: of one program, or of four.
    """
    has_many = n >= 64 * multiprocessors
    if m <= 32:
        tile = (
            {"TOKENS": 16, "ROWS": 64 if has_many else 32}
            if m <= 16
            else {"TOKENS": 32, "ROWS": 32}
        )
        parts = 4 if has_many else 8
        return {**tile, "COLUMNS": 64, "PARTS": parts, "STAGES": 3, "num_warps": parts}
    if m <= 64:
        rows = 128 if n >= 128 * multiprocessors else 64
        tile = {"TOKENS": 64, "ROWS": rows, "STAGES": 3, "num_warps": rows // 16}
    else:
        tile = {"TOKENS": 128, "ROWS": 128, "STAGES": 2, "num_warps": 8}
    return {**tile, "COLUMNS": 128, "PARTS": 1}


def linear(
    x: torch.Tensor,
    codes: torch.Tensor,
    weight_scale: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    blockwise: bool,
) -> torch.Tensor:
    """As `numerics.linear`, for tensors of one GPU; what is launched depends on shapes alone."""
    rows = x.reshape(-1, x.shape[-1])
    rows = rows if rows.stride(1) == 1 else rows.contiguous()
    (m, k), n = rows.shape, codes.shape[0]
    output = x.new_empty(m, n)
    if m:
        tile = tile_of(m, n, _multiprocessors(x.device))
        programs = triton.cdiv(m, tile["TOKENS"]) * triton.cdiv(n, tile["ROWS"])
        with torch.cuda.device_of(x):  # on which Triton launches
            linear_kernel[(programs,)](
                rows,
                codes.detach().view(torch.int8),
                weight_scale.detach(),
                bias,
                output,
                m,
                n,
                k,
                rows.stride(0),
                codes.stride(0),
                weight_scale.stride(0),
                BLOCKWISE=blockwise,
                BIAS=bias is not None,
                WHOLE=k % (tile["PARTS"] * tile["COLUMNS"]) == 0,
                PACKED=codes_at_once(x, tile["PARTS"]),
                **tile,
            )
    return output.view(*x.shape[:-1], n)


def codes_at_once(x: torch.Tensor, parts: int) -> int:
    """How many codes `values_of` converts at a time, by the registers that Triton has them in."""
    if x.dtype != torch.bfloat16 or not has_packed_kernels(x.device):
        return 0
    is_hopper = torch.cuda.get_device_capability(x.device)[0] == 9
    return 2 if parts == 1 and is_hopper else 4


def _multiprocessors(device: torch.device) -> int:
    is_gpu = device.type == "cuda"  # on a CPU only the interpreter runs
    return torch.cuda.get_device_properties(device).multi_processor_count if is_gpu else 1
