"""The GPU's FP8 linear kernels in plain torch, under SGLang's own signatures.

What is emulated: activations quantized per token (and per 128 columns for block scales) to e4m3
with FP32 scales, FP8 × FP8 products, FP32 accumulation with scales, output in the input's dtype; and
`numerics.linear`, whose activations stay as they are. How sums are made exact, and why, is in
`exact_product`. A GPU rounds inside the dot product too, in an order of its own, so it is
close to this and not bitwise equal. `SGLANG_FP8RL_CPU_FP32_SUMS=1`, read at the first call, adds up in FP32
instead, in half the time, and no longer batch invariant.
"""

from __future__ import annotations

import functools
import os
from typing import Any

import numpy as np
import torch

from ...errors import ConfigError
from ...formats.format import ceil_div
from ...numerics.linear import doubled, linear

E4M3_MAX = 448.0
AMAX_FLOOR = 1e-10  # SGLang's kernels use the same: a group of zeros gets 1e-10 / 448, not 0
FP32_SUMS_VARIABLE = "SGLANG_FP8RL_CPU_FP32_SUMS"


@functools.cache
def sum_dtype() -> torch.dtype:
    """What dot products are added up in: FP64, unless the switch says FP32."""
    value = os.environ.get(FP32_SUMS_VARIABLE, "0")
    if value not in ("0", "1"):
        remedy = "Unset it for the default, 0."
        raise ConfigError(FP32_SUMS_VARIABLE, repr(value), "must be 0 or 1", remedy)
    return torch.float32 if value == "1" else torch.float64


@linear.register_kernel("cpu")
def linear_as_it_is(
    x: torch.Tensor, codes: torch.Tensor, weight_scale: torch.Tensor
) -> torch.Tensor:
    return exact_linear(x, codes, weight_scale, sums=sum_dtype())


@doubled.register_kernel("cpu")
def doubled_in_torch(x: torch.Tensor, group: int, pow2: bool = False) -> torch.Tensor:
    q, scale = quantize_per_token_group(x, group, pow2_scale=pow2)
    # As Triton's kernel: with 20 bits of the scale, its product with a code is exact.
    scale = (scale.view(torch.int32) & -16).view(torch.float32)
    held = q.float() * scale.repeat_interleave(group, dim=1)[:, : x.shape[1]]
    near = held.to(x.dtype)
    if x.dtype == torch.bfloat16:  # its ties as the kernel rounds them
        near = ((held.view(torch.int32) + 0x8000) >> 16).to(torch.int16).view(x.dtype)
    return torch.cat([near, (x.float() - held).to(x.dtype)])


def exact_linear(
    x: torch.Tensor,
    codes: torch.Tensor,
    weight_scale: torch.Tensor,
    *,
    sums: torch.dtype = torch.float64,
) -> torch.Tensor:
    """The definition of `numerics.linear` in plain torch, for any floating-point `x`."""
    return exact_product(x, codes, weight_scale, sums=sums).to(x.dtype)


def with_bias(
    output: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype, *, before_rounding: bool
) -> torch.Tensor:
    """FP32 sums `[M, N]` in `dtype`, with the bias added before or after that rounding."""
    if bias is None:
        return output.to(dtype)
    return (output + bias.float()).to(dtype) if before_rounding else output.to(dtype).add_(bias)


def exact_product(
    x: torch.Tensor,
    codes: torch.Tensor,
    weight_scale: torch.Tensor,
    *,
    x_scale: torch.Tensor | None = None,
    block: tuple[int, int] = (128, 128),
    sums: torch.dtype = torch.float64,
) -> torch.Tensor:
    """`[M, K]` times `[N, K]` with their scales, `[M, N]` FP32: the order of a GPU, without its roundings.

    A product of two e4m3 numbers is a multiple of 2⁻¹⁸ below 2¹⁸, so a sum of up to 2¹⁷ of them is
    *exact* in FP64, in whatever order a matrix product adds: each block's is rounded once to FP32. With
    BF16 in place of one of them it is exact up to ties of probability about 1e-8. Then blocks are added
    in FP32, first to last, as `acc += (sum * x_scale) * weight_scale`. So the result for a row does not
    depend on the batch it is in, nor on threads or the machine; with `sums` in FP32 it does, in its last
    bits, and takes half the time.

    Args:
        weight_scale: as of `numerics.linear`.
        x_scale: of quantized activations: `[M, ceil(K / block_k)]` FP32 beside block scales,
            `[M, 1]` or `[1, 1]` beside row scales.
        block: `[block_n, block_k]`.
    """
    wide_x, wide_weight = widened(x, sums), widened(codes, sums)
    if weight_scale.shape == (len(codes), 1):
        total = (wide_x @ wide_weight.t()).float()
        total = total if x_scale is None else total * x_scale
        return total * weight_scale.float().reshape(-1)
    (n, k), (block_n, block_k) = codes.shape, block
    row_scale = weight_scale.float().repeat_interleave(block_n, dim=0)[:n]  # [N, ceil(K / block_k)]
    output = torch.zeros(x.shape[0], n, dtype=torch.float32)
    for number, start in enumerate(range(0, k, block_k)):
        columns = slice(start, start + block_k)
        part = (wide_x[:, columns] @ wide_weight[:, columns].t()).float()
        part = part if x_scale is None else part * x_scale[:, number, None]
        output += part * row_scale[:, number]
    return output


def widened(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The same values in `dtype`. Of e4m3 by table, as torch's own conversion takes one element at a time."""
    if values.dtype != torch.float8_e4m3fn:
        return values.to(dtype)
    codes = values.detach().view(torch.uint8).numpy()
    return torch.from_numpy(np.take(_values_of_codes(dtype), codes))


@functools.cache
def _values_of_codes(dtype: torch.dtype) -> np.ndarray:
    return torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).to(dtype).numpy()


def quantize_per_token_group(
    x: torch.Tensor, group_size: int, *, pow2_scale: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize each row in groups of columns.

    Args:
        x: `[M, K]`, floating point.
        group_size: columns per scale; the last group of a row may be smaller.
        pow2_scale: round scales up to powers of two (UE8M0 activations).

    Returns:
        `[M, K]` e4m3 and `[M, ceil(K / group_size)]` FP32 with `x ≈ q * scale`.
    """
    rows, columns = x.shape
    groups = ceil_div(columns, group_size)
    padded = torch.nn.functional.pad(x.float(), (0, groups * group_size - columns))
    grouped = padded.view(rows, groups, group_size)  # [M, G, group_size]; zeros raise no amax
    scale = grouped.abs().amax(dim=2).clamp_min(AMAX_FLOOR) / E4M3_MAX  # [M, G]
    if pow2_scale:
        scale = torch.exp2(torch.ceil(torch.log2(scale)))
    q = (grouped / scale[:, :, None]).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
    return q.view(rows, groups * group_size)[:, :columns], scale


def block_fp8_linear(
    input: torch.Tensor,
    weight: torch.Tensor,
    block_size: list[int],
    weight_scale: torch.Tensor,
    input_scale: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    *,
    act_scale_ue8m0: bool = False,
) -> torch.Tensor:
    """`input @ (weight * weight_scale).T + bias` with block scales; SGLang's block-linear signature.

    Args:
        input: `[..., K]`; already e4m3 when `input_scale` is given (the output is then BF16).
        weight: `[N, K]` e4m3. N and K need not be multiples of the block.
        block_size: `[block_n, block_k]`.
        weight_scale: `[ceil(N / block_n), ceil(K / block_k)]` FP32.
        input_scale: `[..., ceil(K / block_k)]` FP32 of a quantized input.
        bias: `[N]`, added after the output was rounded to its dtype, as the Triton path does.
        act_scale_ue8m0: power-of-two activation scales.
    """
    rows = input.reshape(-1, input.shape[-1])
    block_k = block_size[1]
    if input_scale is not None:
        x_scale = input_scale.reshape(rows.shape[0], -1).float()
        out_dtype = torch.bfloat16
    else:
        out_dtype = input.dtype
        rows, x_scale = quantize_per_token_group(rows, block_k, pow2_scale=act_scale_ue8m0)
    block = (block_size[0], block_k)
    output = exact_product(
        rows, weight, weight_scale, x_scale=x_scale, block=block, sums=sum_dtype()
    )
    output = with_bias(output, bias, out_dtype, before_rounding=False)
    return output.view(*input.shape[:-1], weight.shape[0])


def apply_fp8_linear(
    input: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    input_scale: torch.Tensor | None = None,
    input_scale_ub: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    pre_quant_output_dtype: torch.dtype | None = None,
    **_tuning: Any,
) -> torch.Tensor:
    """Per-channel (or per-tensor) weights, dynamic per-token activations; SGLang's signature.

    Args:
        input: `[..., K]`; may be e4m3 already, with its `input_scale`.
        weight: `[K, N]` e4m3: SGLang passes the transposed view of an `[N, K]` buffer.
        weight_scale: N values, `[N, 1]` or `[1, N]`, or a single one.
        input_scale: a static scale (one value), or per token for a quantized input.
        bias: `[N]`, added in FP32 before the one rounding to the output's dtype.
        _tuning: SGLang's kernel choices (`cutlass_fp8_supported`, `pad_output`, …): no effect here.
    """
    if input_scale_ub is not None:
        raise NotImplementedError("input_scale_ub is not emulated on the CPU platform")
    rows = input.reshape(-1, input.shape[-1])
    out_dtype = input.dtype
    if rows.dtype == torch.float8_e4m3fn:
        assert input_scale is not None, "a quantized input comes with its scale"
        x_scale = input_scale.float().reshape(-1, 1)
        out_dtype = pre_quant_output_dtype or torch.bfloat16
    elif input_scale is not None:
        x_scale = input_scale.float().reshape(1, 1)
        rows = (rows.float() / x_scale).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
    else:
        rows, x_scale = quantize_per_token_group(rows, rows.shape[1])
    n = weight.shape[1]
    row_scale = weight_scale.reshape(-1, 1).expand(n, 1)
    output = exact_product(rows, weight.t(), row_scale, x_scale=x_scale, sums=sum_dtype())
    output = with_bias(output, bias, out_dtype, before_rounding=True)
    return output.view(*input.shape[:-1], n)
