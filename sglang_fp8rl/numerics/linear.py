"""The product of a linear layer with stored codes: `y = x · (q · scale)ᵀ`, activations as they are.

The weight is read as it is served: e4m3 codes with FP32 scales, of 128×128 blocks or of rows. Each block's
product is added up, times its scale, in FP32; a row's scale is applied behind the whole sum.

`linear` is an operator of torch, so that CUDA graphs and `torch.compile` take it as one step. Triton's
kernel is registered for CUDA; whoever serves on another device registers one of its own, as the lab's CPU
platform does with `exact_linear`.
"""

from __future__ import annotations

import functools

import numpy as np
import torch

from ..errors import QuantizationError

BLOCK = (128, 128)


@torch.library.custom_op("sglang_fp8rl::linear", mutates_args=(), device_types="cuda")
def linear(
    x: torch.Tensor,
    codes: torch.Tensor,
    weight_scale: torch.Tensor,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """`[..., K]` to `[..., N]`, in the dtype of `x`.

    Args:
        x: `[..., K]` BF16 or FP16.
        codes: `[N, K]` e4m3; rows are contiguous, and may lie apart.
        weight_scale: FP32 multipliers that dequantize: `[ceil(N / 128), ceil(K / 128)]` of blocks, or
            `[N, 1]` of rows.
        bias: `[N]`. Added where SGLang's W8A8 kernels add it: beside block scales after the sum was
            rounded to the output's dtype, beside row scales before.

    Raises:
        QuantizationError: activations in FP32, of which tensor cores read TF32.
    """
    if x.dtype not in (torch.bfloat16, torch.float16):
        raise QuantizationError(
            "x", str(x.dtype), "activations are BF16 or FP16", "Serve the model in BF16."
        )
    from .triton.linear import linear as on_cuda

    return on_cuda(x, codes, weight_scale, bias, blockwise=not is_per_channel(codes, weight_scale))


@linear.register_fake
def _(
    x: torch.Tensor,
    codes: torch.Tensor,
    weight_scale: torch.Tensor,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    return x.new_empty(*x.shape[:-1], codes.shape[0])


def exact_linear(
    x: torch.Tensor,
    codes: torch.Tensor,
    weight_scale: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    sums: torch.dtype = torch.float64,
) -> torch.Tensor:
    """The definition of `linear` in plain torch, for any floating-point `x`."""
    rows = x.reshape(-1, x.shape[-1])
    output = exact_product(rows, codes, weight_scale, sums=sums)
    output = with_bias(output, bias, x.dtype, before_rounding=is_per_channel(codes, weight_scale))
    return output.view(*x.shape[:-1], codes.shape[0])


def is_per_channel(codes: torch.Tensor, weight_scale: torch.Tensor) -> bool:
    """Whether `[N, K]` codes have a scale for each row. (Of a single block both mean the same.)"""
    return tuple(weight_scale.shape) == (codes.shape[0], 1)


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
    block: tuple[int, int] = BLOCK,
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
        weight_scale: as of `linear`.
        x_scale: of quantized activations: `[M, ceil(K / block_k)]` FP32 beside block scales,
            `[M, 1]` or `[1, 1]` beside row scales.
        block: `[block_n, block_k]`.
    """
    wide_x, wide_weight = widened(x, sums), widened(codes, sums)
    if is_per_channel(codes, weight_scale):
        total = (wide_x @ wide_weight.t()).float()
        total = total if x_scale is None else total * x_scale
        return total * weight_scale.float().reshape(-1)
    (n, k), (block_n, block_k) = codes.shape, block
    row_scale = weight_scale.float().repeat_interleave(block_n, dim=0)[:n]  # [N, ceil(K / block_k)]
    output = torch.zeros(x.shape[0], n)
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
