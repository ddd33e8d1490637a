"""SGLang's fused experts in plain torch, quantized or not, under the Triton runner's signature.

One expert at a time, in the Triton kernels' order of rounding: gate/up product → activation dtype,
`silu(gate) * up` in FP32 → activation dtype, down product × router weight in FP32 → activation dtype,
then the sum over the top-k slots in FP32, first slot to last. A token's result does not depend on
the batch it is in (see `cpu_kernels` for the products).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from .cpu_linear import (
    apply_fp8_linear,
    block_fp8_linear,
)


def fused_experts(
    hidden_states: torch.Tensor,
    w1: torch.Tensor,
    w2: torch.Tensor,
    topk_output: Any,
    moe_runner_config: Any,
    b1: torch.Tensor | None = None,
    b2: torch.Tensor | None = None,
    use_fp8_w8a8: bool = False,
    per_channel_quant: bool = False,
    w1_scale: torch.Tensor | None = None,
    w2_scale: torch.Tensor | None = None,
    a1_scale: torch.Tensor | None = None,
    a2_scale: torch.Tensor | None = None,
    block_shape: list[int] | None = None,
    **others: Any,
) -> torch.Tensor:
    """All experts of one layer on this rank.

    Args:
        hidden_states: `[T, H]`.
        w1: `[E, 2I, H]`, gate rows then up rows. w2: `[E, H, I]`.
        topk_output: router weights and expert ids `[T, top_k]`; id −1 is an expert of another rank.
        moe_runner_config: SGLang's `MoeRunnerConfig`.
        w1_scale, w2_scale: blocks `[E, N / block_n, K / block_k]`, rows `[E, N, 1]`, or `[E]`.
        block_shape: `[block_n, block_k]`, or None for one scale per row or expert.
        others: the Triton runner's remaining arguments; a value that would change the result is
            refused.
    """
    config = moe_runner_config
    _refuse_unsupported(config, {"a1_scale": a1_scale, "a2_scale": a2_scale, **others})
    router_weights, expert_ids = topk_output[0], topk_output[1]
    slots = hidden_states.new_zeros(*expert_ids.shape, w2.shape[1])  # [T, top_k, H]
    for expert in range(w1.shape[0]):
        token, slot = torch.where(expert_ids == expert)
        if not token.numel():
            continue
        weight = router_weights[token, slot].float()[:, None]
        x = hidden_states[token]
        if config.apply_router_weight_on_input:
            x = (x.float() * weight).to(x.dtype)
        scale1 = w1_scale[expert] if w1_scale is not None else None
        scale2 = w2_scale[expert] if w2_scale is not None else None
        gate_up = _linear(
            x, w1[expert], scale1, block_shape, b1[expert] if b1 is not None else None
        )
        x = _gated(gate_up, config.activation)
        x = _linear(
            x, w2[expert], scale2, block_shape, b2[expert] if b2 is not None else None, True
        )
        if not config.apply_router_weight_on_input:
            x = x * weight
        slots[token, slot] = x.to(slots.dtype)
    if config.no_combine:
        return slots
    total = torch.zeros(slots.shape[0], slots.shape[2])
    for slot_index in range(slots.shape[1]):
        total += slots[:, slot_index].float()
    output = (total * (config.routed_scaling_factor or 1.0)).to(hidden_states.dtype)
    return hidden_states.copy_(output) if config.inplace else output


def moe_forward_native(
    layer: Any, x: torch.Tensor, topk_output: Any, moe_runner_config: Any
) -> torch.Tensor:
    """The unquantized experts, under the signature of SGLang's `fused_moe_native`."""
    return fused_experts(
        x,
        layer.w13_weight,
        layer.w2_weight,
        topk_output,
        moe_runner_config,
        b1=getattr(layer, "w13_weight_bias", None),
        b2=getattr(layer, "w2_weight_bias", None),
    )


def _linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor | None,
    block_shape: list[int] | None,
    bias: torch.Tensor | None,
    keep_fp32: bool = False,
) -> torch.Tensor:
    """One expert's projection; FP32 out if `keep_fp32`, for the router weight comes before rounding."""
    out_dtype = torch.float32 if keep_fp32 else x.dtype
    if weight_scale is None:
        output = x.double() @ weight.double().t()
    elif block_shape is not None:
        output = block_fp8_linear(x.float(), weight, block_shape, weight_scale)
    else:
        output = apply_fp8_linear(x.float(), weight.t(), weight_scale)
    if bias is not None:
        output = output + bias.to(output.dtype)
    return output.to(out_dtype)


def _gated(gate_up: torch.Tensor, activation: str) -> torch.Tensor:
    gate, up = gate_up.float().chunk(2, dim=-1)
    if activation not in ("silu", "gelu"):
        raise NotImplementedError(f"activation {activation!r} is not emulated on the CPU platform")
    gate = F.silu(gate) if activation == "silu" else F.gelu(gate)
    return (gate * up).to(gate_up.dtype)


def _refuse_unsupported(config: Any, arguments: dict[str, Any]) -> None:
    """Refuse every option that would change the result and is not emulated."""
    for name in ("gemm1_alpha", "gemm1_clamp_limit", "swiglu_limit"):
        arguments[name] = getattr(config, name, None)
    arguments["not is_gated"] = not getattr(config, "is_gated", True)
    for name, value in arguments.items():
        if value is not None and value is not False:
            raise NotImplementedError(f"{name}={value!r} is not emulated on the CPU platform")
