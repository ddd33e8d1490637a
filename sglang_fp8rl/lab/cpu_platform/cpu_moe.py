"""SGLang's experts in plain torch, quantized or not, under the signatures of the Triton runner's steps, and of all.

One expert at a time, in the Triton kernels' order of rounding: gate/up product → activation dtype,
`silu(gate) * up` in FP32 → activation dtype, down product × router weight in FP32 → activation dtype,
then the sum over the top-k slots in FP32, first slot to last. A token's result does not depend on
the batch it is in (see `cpu_linear.exact_product`).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from .cpu_linear import apply_fp8_linear, block_fp8_linear


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
        use_fp8_w8a8: quantize activations.
        w1_scale, w2_scale: blocks `[E, N / block_n, K / block_k]`, rows `[E, N, 1]`, or `[E]`.
        block_shape: `[block_n, block_k]`, or None for one scale per row or expert.
        others: the Triton runner's remaining arguments; a value that would change the result is refused.
    """
    config = moe_runner_config
    _refuse_unsupported(config, {"a1_scale": a1_scale, "a2_scale": a2_scale, **others})
    router_weights, expert_ids = topk_output[:2]
    tokens, top_k = expert_ids.shape
    early = config.apply_router_weight_on_input
    how: dict[str, Any] = {"use_fp8_w8a8": use_fp8_w8a8, "block_shape": block_shape}
    routed = (router_weights, expert_ids, None, None, None)
    gate_up = hidden_states.new_empty(tokens * top_k, w1.shape[1])
    grouped_product(
        hidden_states, w1, b1, gate_up, None, w1_scale, None, *routed, early, top_k, **how
    )
    slots = hidden_states.new_empty(tokens * top_k, w2.shape[1])
    x = _gated(gate_up, config.activation)
    grouped_product(x, w2, b2, slots, None, w2_scale, None, *routed, not early, 1, **how)
    slots = slots.view(tokens, top_k, -1)
    if config.no_combine:
        return slots
    total = torch.zeros(slots.shape[0], slots.shape[2], dtype=torch.float32)
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


def sorted_by_expert(
    dispatch_output: Any, quant_info: Any, runner_config: Any, running_state: dict[str, Any]
) -> Any:
    """Nothing is sorted here, and no tile chosen; under the signature of `pre_permute_standard_to_triton`."""
    from sglang.srt.layers.moe.moe_runner.triton import TritonRunnerInput

    running_state.update(config={}, down_config=None)
    topk = dispatch_output.topk_output
    hidden_states: Any = dispatch_output.hidden_states
    return TritonRunnerInput(hidden_states, topk.topk_weights, topk.topk_ids, None, None, None)


def grouped_product(
    A: torch.Tensor,
    B: torch.Tensor,
    bias: torch.Tensor | None,
    C: torch.Tensor,
    A_scale: None,
    B_scale: Any,
    B_zp: None,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    sorted_token_ids: Any,
    expert_ids: Any,
    num_tokens_post_padded: Any,
    mul_routed_weight: bool,
    top_k: int,
    config: Any = None,
    compute_type: Any = None,
    *,
    use_fp8_w8a8: bool,
    block_shape: list[int] | None = None,
    per_channel_quant: bool = False,
    **others: Any,
) -> None:
    """`invoke_fused_moe_kernel`: each slot's row of `A` times its expert of `B` `[E, N, K]`, into `C` `[slots, N]`.

    Rows of `A` are for `top_k` slots each; the router's weight comes before the one rounding.
    """
    unread = {} if use_fp8_w8a8 else {"B_scale": B_scale}
    _refuse({"A_scale": A_scale, "B_zp": B_zp, **unread, **others})
    ids, weights = topk_ids.flatten(), topk_weights.flatten().float()
    C.zero_()
    for expert in range(B.shape[0]):
        (slots,) = torch.where(ids == expert)
        if not slots.numel():
            continue
        x = A[slots // top_k].float()
        if not use_fp8_w8a8:
            output = (x.double() @ B[expert].double().t()).float()
        elif block_shape is not None:
            output = block_fp8_linear(x, B[expert], block_shape, B_scale[expert])
        else:
            output = apply_fp8_linear(x, B[expert].t(), B_scale[expert])
        if bias is not None:
            output = output + bias[expert].float()
        output = output * weights[slots, None] if mul_routed_weight else output
        C[slots] = output.to(C.dtype)


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
    _refuse({**arguments, "not is_gated": not getattr(config, "is_gated", True)})


def _refuse(arguments: dict[str, Any]) -> None:
    for name, value in arguments.items():
        if value is not None and value is not False:
            raise NotImplementedError(f"{name}={value!r} is not emulated on the CPU platform")
