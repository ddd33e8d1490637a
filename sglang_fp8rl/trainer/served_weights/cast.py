"""`served(w)`: the parameter as its server holds it, in BF16. An operator of its own, for `torch.compile`."""

from __future__ import annotations

from typing import Any

import torch

from ...numerics import Blockwise, through_fp8
from .rules import ServedWeightsError, WeightRule

COMPUTE_DTYPES = (torch.bfloat16, torch.float32)


@torch.library.custom_op(
    "sglang_fp8rl::served",
    mutates_args=(),
    schema="(Tensor weight, int matrices, int[] block, bool pow2, bool to_bf16, bool again) -> Tensor",
)
def _served(
    weight: torch.Tensor, matrices: int, block: list[int], pow2: bool, to_bf16: bool, again: bool
) -> torch.Tensor:
    columns = weight.shape[-1]
    rows = weight.numel() // columns
    granularity = Blockwise.of(block)
    options: Any = {"pow2_scale": pow2, "round_to_bf16": to_bf16}
    stack = weight.detach().reshape(rows, columns)
    if (rows // matrices) % granularity.block_n == 0:  # no block reaches into the next matrix
        return through_fp8(stack, granularity, **options).view(weight.shape)
    parts = [through_fp8(one, granularity, **options) for one in stack.chunk(matrices)]
    return torch.cat(parts).view(weight.shape)


@_served.register_fake
def _(
    weight: torch.Tensor, matrices: int, block: list[int], pow2: bool, to_bf16: bool, again: bool
) -> torch.Tensor:
    return torch.empty(weight.shape, dtype=torch.bfloat16, device=weight.device)


def served(weight: torch.Tensor, rule: WeightRule, *, again: bool = False) -> torch.Tensor:
    """`weight` through the server's cast and back, BF16, contiguous; no gradient.

    Args:
        again: in a backward pass. Nothing changes but that a compiler takes both for two values, and
            does not keep one for the other.

    Raises:
        ServedWeightsError: a shard, a dtype that nothing is computed in.
    """
    if hasattr(weight, "to_local"):
        raise ServedWeightsError(
            rule.name,
            f"a DTensor placed as {getattr(weight, 'placements', ())} while it is computed with",
            "scales belong to whole blocks, so a weight is gathered before it is used",
            "Shard with fully_shard, which gathers it; tensor parallelism in the trainer is not served.",
        )
    check_compute_dtype(weight.dtype, rule)
    rounding = (rule.pow2_scale, rule.round_to_bf16)
    return torch.ops.sglang_fp8rl.served(weight, rule.matrices, rule.block, *rounding, again)


def check_compute_dtype(dtype: torch.dtype, rule: WeightRule) -> None:
    """Raises `ServedWeightsError` where a served weight would be rounded once more."""
    if dtype not in COMPUTE_DTYPES:
        raise ServedWeightsError(
            rule.name,
            f"computed in {dtype}",
            "served weights are BF16 numbers, which BF16 and FP32 hold and FP16 does not",
            "Train in BF16, or with FP32 parameters.",
        )
