"""The GPU's W8A8 linear kernels in plain torch, under SGLang's own signatures.

What is emulated: activations quantized per token (and per 128 columns for block scales) to e4m3
with FP32 scales, FP8 × FP8 products, FP32 accumulation with scales, output in the input's dtype.

Order of summation, and why FP64 appears in it. A product of two e4m3 numbers is a multiple of
2⁻¹⁸ below 2¹⁸, so a sum of up to 2¹⁷ of them is *exact* in FP64, in whatever order a matrix product
adds. Each scale block's dot product is therefore computed exactly and rounded once to FP32; then
blocks are added in FP32, first to last, as `acc += (dot * activation_scale) * weight_scale`. So the
result for a row does not depend on the batch it is in, nor on threads or the machine. (torch's
FP32 product on a CPU does: M=1 and M=64 differ in the last bits.) A GPU rounds inside the dot
product too, in an order of its own, so it is close to this and not bitwise equal.

Switches, read once, at the first call. `SGLANG_FP8RL_CPU_ACTIVATION_QUANT=0` leaves activations as they
are (weights still FP8), to tell what weight and what activation quantization each cost. Sums are then
rounded once from FP64, which is batch invariant up to ties of probability about 1e-8.
`SGLANG_FP8RL_CPU_FP32_SUMS=1` adds up in FP32 instead, in half the time: no longer batch invariant, and as
near to a GPU as before, which rounds inside the sum too.
"""

from __future__ import annotations

import functools
import os
from typing import Any

import numpy as np
import torch

from ...errors import ConfigError
from ...numerics.grid import ceil_div

E4M3_MAX = 448.0
AMAX_FLOOR = 1e-10  # SGLang's kernels use the same: a group of zeros gets 1e-10 / 448, not 0
ACTIVATION_QUANT_VARIABLE = "SGLANG_FP8RL_CPU_ACTIVATION_QUANT"
FP32_SUMS_VARIABLE = "SGLANG_FP8RL_CPU_FP32_SUMS"


@functools.cache
def activation_quant_enabled() -> bool:
    """Whether activations are quantized: yes, unless the switch above is `0`."""
    return _is_on(ACTIVATION_QUANT_VARIABLE, "1")


@functools.cache
def sum_dtype() -> torch.dtype:
    """What dot products are added up in: FP64, unless the switch above says FP32."""
    return torch.float32 if _is_on(FP32_SUMS_VARIABLE, "0") else torch.float64


def _is_on(variable: str, default: str) -> bool:
    value = os.environ.get(variable, default)
    if value not in ("0", "1"):
        raise ConfigError(
            variable, repr(value), "must be 0 or 1", f"Unset it for the default, {default}."
        )
    return value == "1"


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
    return q.view(rows, -1)[:, :columns], scale


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
        rows, x_scale = _maybe_quantized(rows, block_k, pow2_scale=act_scale_ue8m0)
    output = block_scaled_matmul(rows, x_scale, weight, weight_scale, block_size).to(out_dtype)
    if bias is not None:
        output += bias
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
        rows, x_scale = _maybe_quantized(rows, rows.shape[1])
    output = channel_scaled_matmul(rows, x_scale, weight.t(), weight_scale)
    if bias is not None:
        output += bias.float()
    return output.to(out_dtype).view(*input.shape[:-1], weight.shape[1])


def block_scaled_matmul(
    x: torch.Tensor,
    x_scale: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    block_size: list[int],
) -> torch.Tensor:
    """`[M, K]`, `[M, KB]`, `[N, K]`, `[NB, KB]` → `[M, N]` FP32, summed as the module says."""
    block_n, block_k = block_size
    n, k = weight.shape
    wide_x, wide_w = as_summed(x), as_summed(weight)
    w_scale = weight_scale.float().repeat_interleave(block_n, dim=0)[:n]  # [N, KB]
    output = torch.zeros(x.shape[0], n)
    for block, start in enumerate(range(0, k, block_k)):
        columns = slice(start, start + block_k)
        dot = (wide_x[:, columns] @ wide_w[:, columns].t()).float()  # rounded once
        output += (dot * x_scale[:, block, None]) * w_scale[:, block]
    return output


def channel_scaled_matmul(
    x: torch.Tensor, x_scale: torch.Tensor, weight: torch.Tensor, weight_scale: torch.Tensor
) -> torch.Tensor:
    """`[M, K]`, `[M, 1]` (or `[1, 1]`), `[N, K]`, N scales (or one) → `[M, N]` FP32."""
    dot = (as_summed(x) @ as_summed(weight).t()).float()  # rounded once
    return (dot * x_scale) * weight_scale.float().reshape(-1)


def as_summed(values: torch.Tensor) -> torch.Tensor:
    """The same values in `sum_dtype()`. Of e4m3 by table, as torch's own conversion takes one element at a time."""
    dtype = sum_dtype()
    if values.dtype != torch.float8_e4m3fn:
        return values.to(dtype)
    codes = values.detach().view(torch.uint8).numpy()
    return torch.from_numpy(np.take(_values_of_codes(dtype), codes))


@functools.cache
def _values_of_codes(dtype: torch.dtype) -> np.ndarray:
    return torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).to(dtype).numpy()


def _maybe_quantized(
    rows: torch.Tensor, group_size: int, *, pow2_scale: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    if activation_quant_enabled():
        return quantize_per_token_group(rows, group_size, pow2_scale=pow2_scale)
    return rows, torch.ones(rows.shape[0], ceil_div(rows.shape[1], group_size))
