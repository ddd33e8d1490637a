"""SGLang's fused experts in plain torch, quantized or not, under the Triton runner's signature.

One expert at a time, in the Triton kernels' order of rounding: gate/up product → activation dtype,
`silu(gate) * up` in FP32 → activation dtype, down product × router weight in FP32 → activation dtype,
then the sum over the top-k slots in FP32, first slot to last. A token's result does not depend on
the batch it is in (see `cpu_linear.exact_product`).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from .cpu_linear import apply_fp8_linear, block_fp8_linear, linear_as_it_is


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
        use_fp8_w8a8: quantize activations; without it FP8 weights meet them as they are.
        w1_scale, w2_scale: blocks `[E, N / block_n, K / block_k]`, rows `[E, N, 1]`, or `[E]`.
        block_shape: `[block_n, block_k]`, or None for one scale per row or expert.
        others: the Triton runner's remaining arguments; a value that would change the result is refused.
    """
    config = moe_runner_config
    _refuse_unsupported(config, {"a1_scale": a1_scale, "a2_scale": a2_scale, **others})
    router_weights, expert_ids = topk_output[:2]
    slots = hidden_states.new_zeros(*expert_ids.shape, w2.shape[1])  # [T, top_k, H]
    for expert in range(w1.shape[0]):
        token, slot = torch.where(expert_ids == expert)
        if not token.numel():
            continue
        weight = router_weights[token, slot].float()[:, None]
        x = hidden_states[token]
        if config.apply_router_weight_on_input:
            x = (x.float() * weight).to(x.dtype)
        scale1, scale2, bias1, bias2 = (
            None if one is None else one[expert] for one in (w1_scale, w2_scale, b1, b2)
        )
        shared: dict[str, Any] = {"block_shape": block_shape, "use_fp8_w8a8": use_fp8_w8a8}
        gate_up = _linear(x, w1[expert], scale1, bias1, x.dtype, **shared)
        x = _gated(gate_up, config.activation)
        # The router weight comes before rounding.
        x = _linear(x, w2[expert], scale2, bias2, torch.float32, **shared)
        if not config.apply_router_weight_on_input:
            x = x * weight
        slots[token, slot] = x.to(slots.dtype)
    if config.no_combine:
        return slots
    total = torch.zeros(slots.shape[0], slots.shape[2])
    for summand in slots.unbind(1):
        total += summand.float()
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
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
    *,
    block_shape: list[int] | None,
    use_fp8_w8a8: bool,
) -> torch.Tensor:
    if weight_scale is None:
        output = x.double() @ weight.double().t()
    elif not use_fp8_w8a8:
        output = linear_as_it_is(x.float(), weight, weight_scale)
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
