"""This package's test launcher, with BF16 products that this CPU computes in FP32 and rounds once.

Without AVX-512, torch multiplies BF16 matrices one element at a time. A BF16 product is summed in FP32
and rounded once either way; only the order of the sum differs. FP8 products are the CPU platform's.
"""

from __future__ import annotations

from typing import Any

import torch

LINEAR = "sglang.srt.layers.quantization.unquant.UnquantizedLinearMethod.apply"
HEAD = "sglang.srt.layers.logits_processor.LogitsProcessor._compute_lm_head"


def wide_linear(self: Any, layer: Any, x: torch.Tensor, bias: Any = None) -> torch.Tensor:
    """`F.linear` in FP32, rounded to the input's dtype."""
    wide = torch.nn.functional.linear(
        x.float(), layer.weight.float(), None if bias is None else bias.float()
    )
    return wide.to(x.dtype)


def wide_head(
    self: Any, hidden_states: torch.Tensor, lm_head: Any, embedding_bias: Any = None, **_: Any
) -> torch.Tensor:
    """Logits, rounded to the head's dtype as SGLang's own product is."""
    dtype = lm_head.weight.dtype
    logits = hidden_states.to(dtype).float() @ lm_head.weight.float().t()
    return logits.to(dtype)


def main() -> None:
    """Run the server with this process's command line."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from sglang_fp8rl.lab.testing.launch import main as launch

    if not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        HookRegistry.register(LINEAR, wide_linear, HookType.REPLACE)
        HookRegistry.register(HEAD, wide_head, HookType.REPLACE)
    launch()


if __name__ == "__main__":
    main()
