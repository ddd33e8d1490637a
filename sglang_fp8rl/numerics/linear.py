"""The product of a linear layer with stored codes: `y = x · (q · scale)ᵀ`, activations as they are.

The weight is read as it is served: e4m3 codes with FP32 scales, of 128×128 blocks or of rows. Each block's
product is added up, times its scale, in FP32; a row's scale is applied behind the whole sum.

`linear` is an operator of torch, so that CUDA graphs and `torch.compile` take it as one step. Triton's
kernel is registered for CUDA; whoever serves on another device registers one of its own, as the lab's CPU
platform does with `exact_linear`.
"""

from __future__ import annotations

import torch

from ..errors import QuantizationError


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


def is_per_channel(codes: torch.Tensor, weight_scale: torch.Tensor) -> bool:
    """Whether `[N, K]` codes have a scale for each row. (Of a single block both mean the same.)"""
    return tuple(weight_scale.shape) == (codes.shape[0], 1)
