"""Experts whose activations stay in BF16: SGLang's grouped products one by one, each with doubled rows.

Every token comes twice, with the same experts: as it is, and as what its quantization leaves of it
(`numerics.linear.doubled`). Both halves of a product are added in FP32 before the nonlinearity, and what comes
out of that is doubled anew. Of SGLang's runners only Triton's has products that can be called alone.
"""

from __future__ import annotations

from typing import Any

import torch
import triton.language as tl
from sglang.srt.layers.activation import GeluAndMul, SiluAndMul
from sglang.srt.layers.moe.token_dispatcher.standard import StandardDispatchOutput
from sglang.srt.layers.moe.topk import StandardTopKOutput

from ...numerics.linear import doubled

# Doubled and in FP32, a product takes four times the memory of SGLang's: not of more tokens at a time.
_TOKENS = 2048
_NONLINEARITIES = {"silu": SiluAndMul, "gelu": lambda: GeluAndMul(approximate="none")}
_NOT_MADE = ("no_combine", "gemm1_alpha", "gemm1_clamp_limit", "swiglu_limit")


def unmade(config: Any) -> str:
    """What SGLang's `MoeRunnerConfig` asks for that is not made here, or nothing."""
    asked = [f"{name}={getattr(config, name)}" for name in _NOT_MADE if getattr(config, name, None)]
    if not config.is_gated or config.activation not in _NONLINEARITIES:
        asked.append(f"activation={config.activation}, is_gated={config.is_gated}")
    return ", ".join(asked)


class DoubledExperts:
    """The experts of one layer, whose config leaves nothing unmade."""

    def __init__(self, config: Any) -> None:
        self._config, self._nonlinearity = config, _NONLINEARITIES[config.activation]()

    def run(self, x: torch.Tensor, topk: Any, info: Any) -> torch.Tensor:
        """Of tokens, with SGLang's `TopKOutput` and `TritonMoeQuantInfo`."""
        weights, ids = (one.split(_TOKENS) for one in topk[:2])
        parts = zip(x.split(_TOKENS), weights, ids, strict=True)
        return torch.cat([self._sum(*part, info) for part in parts])

    def _sum(
        self, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, info: Any
    ) -> torch.Tensor:
        from sglang.kernels.ops.moe.fused_moe_triton_kernels import invoke_fused_moe_kernel
        from sglang.srt.layers.moe.moe_runner.triton import pre_permute_standard_to_triton

        def product(
            rows: torch.Tensor, codes: torch.Tensor, scale: torch.Tensor, tile: Any, weighted: bool
        ) -> torch.Tensor:
            output = x.new_empty(2 * ids.numel(), codes.shape[1], dtype=torch.float32)
            invoke_fused_moe_kernel(
                rows, codes, None, output, None, scale, None, given.topk_weights, given.topk_ids,
                given.sorted_token_ids, given.expert_ids, given.num_tokens_post_padded, weighted,
                output.shape[0] // max(rows.shape[0], 1), tile, compute_type=tl.float32,
                use_fp8_w8a8=True, use_int8_w8a8=False, use_int8_w8a16=False, use_int4_w4a16=False,
                per_channel_quant=info.per_channel_quant, block_shape=info.block_shape,
            )  # fmt: skip
            return output.unflatten(0, (2, *ids.shape))  # [2, tokens, top_k, N]

        config, state = self._config, dict[str, Any]()
        early, group = config.apply_router_weight_on_input, info.block_shape and info.block_shape[1]
        both = doubled(x, group or x.shape[1])
        topk = StandardTopKOutput(weights.repeat(2, 1), ids.repeat(2, 1), weights)
        sent = StandardDispatchOutput(both, None, topk)
        given = pre_permute_standard_to_triton(sent, info, config, state)  # sorts by expert, once
        gate_up = product(both, info.w13_weight, info.w13_scale, state["config"], early).sum(0)
        inner = self._nonlinearity(gate_up.to(x.dtype)).flatten(0, 1)
        inner = doubled(inner, group or inner.shape[1])
        tile = state["down_config"] or state["config"]
        total = product(inner, info.w2_weight, info.w2_scale, tile, not early).sum((0, 2))
        return (total * (config.routed_scaling_factor or 1.0)).to(x.dtype)
