"""Products of a linear layer with stored codes, `y = x · (q · scale)ᵀ`, whose activations stay in BF16.

`linear` multiplies as it is: each block's product is added up, times its scale, in FP32; a row's scale is applied
behind the whole sum. `doubled` is for kernels that multiply FP8 with FP8: a BF16 number has 8 significant bits, an
e4m3 number 4, so two hold it. The products of a row and of what its quantization leaves of it are added.

Both are operators of torch, so that CUDA graphs and `torch.compile` take them as one step. Whoever serves on another
device registers kernels of its own, as the lab's CPU platform does.
"""

from __future__ import annotations

import torch

from ..errors import QuantizationError


@torch.library.custom_op("sglang_fp8rl::linear", mutates_args=(), device_types="cuda")
def linear(x: torch.Tensor, codes: torch.Tensor, weight_scale: torch.Tensor) -> torch.Tensor:
    """`[M, K]` to `[M, N]`, in the dtype of `x`, BF16 or FP16. Raises `QuantizationError` for activations in FP32, of which
    tensor cores read TF32.

    Args:
        codes: `[N, K]` e4m3; rows are contiguous, and may lie apart.
        weight_scale: FP32, `[ceil(N / 128), ceil(K / 128)]` of blocks, or `[N, 1]` of rows; of a single block both mean the same.
    """
    from .triton.linear import linear as on_cuda

    _check(x)
    return on_cuda(x, codes, weight_scale)


@linear.register_fake
def _(x: torch.Tensor, codes: torch.Tensor, weight_scale: torch.Tensor) -> torch.Tensor:
    return x.new_empty(x.shape[0], codes.shape[0])


@torch.library.custom_op("sglang_fp8rl::doubled", mutates_args=(), device_types="cuda")
def doubled(x: torch.Tensor, group: int, pow2: bool = False) -> torch.Tensor:
    """`[M, K]` BF16 or FP16 to `[2M, K]`: the rows as e4m3 holds them, with a scale, an `amax / 448`, for every `group` columns
    (a power of two with `pow2`, rounded up), and below them what that leaves of each.

    SGLang's kernels quantize both again. Some multiply where others divide, which at a tie takes another code; so the
    first half lies at codes, and whoever quantizes it finds these.
    """
    from .triton.linear import doubled as on_cuda

    _check(x)
    return on_cuda(x, group, pow2)


@doubled.register_fake
def _(x: torch.Tensor, group: int, pow2: bool = False) -> torch.Tensor:
    return x.new_empty(2 * x.shape[0], x.shape[1])


def _check(x: torch.Tensor) -> None:
    if x.dtype not in (torch.bfloat16, torch.float16):
        raise QuantizationError(
            "x", str(x.dtype), "activations are BF16 or FP16", "Serve the model in BF16."
        )
