"""MLA on the CPU: absorbed, over the latent KV cache, with the derived weights a GPU has.

SGLang's `torch_native` attention is not registered for MLA and falls to a handler that reads keys the
latent cache does not hold. Absorbed attention needs nothing but `w_kc`, `w_vc` and plain attention.
"""

from __future__ import annotations

from typing import Any

import torch


def use_absorbed_mla() -> None:
    """Tell SGLang's DeepSeek models which forward method `torch_native` takes.

    Side effects on the host: registers a handler for `torch_native`.
    """
    from sglang.srt.models.deepseek_common.attention_backend_handler import AttentionBackendRegistry

    AttentionBackendRegistry.register("torch_native", _absorbed)


def _absorbed(attention: Any, forward_batch: Any) -> Any:
    from sglang.srt.models.deepseek_common.attention_forward_methods.forward_methods import (
        AttnForwardMethod,
    )

    return AttnForwardMethod.MLA


def blocks_as_bf16(
    codes: torch.Tensor, scales: torch.Tensor, block_size: list[int]
) -> tuple[torch.Tensor, float]:
    """`kv_b_proj` as a GPU derives from it: dequantized to BF16, and no scale.

    Args:
        codes: `[N, K]` e4m3. scales: `[ceil(N / block_n), ceil(K / block_k)]` FP32.
    """
    from sglang.srt.layers.quantization.fp8_utils import block_quant_dequant

    return block_quant_dequant(codes, scales, block_size, torch.bfloat16), 1.0
