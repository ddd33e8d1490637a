"""BF16 products on a CPU that has no instructions for them: the same sums, in FP32.

A BF16 product is summed in FP32 and rounded once. Without AVX-512, torch does that one element at a
time, 10 to 40 times slower than in FP32; so the operands are widened and the result is rounded here.
"""

from __future__ import annotations

import torch


def widen_products(model: torch.nn.Module) -> None:
    """Replace the products of every `Linear` of `model` where this CPU wants it.

    Side effects: each such module gets a `forward` of its own.
    """
    if torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return
    for module in model.modules():
        if isinstance(module, torch.nn.Linear):
            module.forward = _Wide(module)  # type: ignore[method-assign, assignment]


class _Wide:
    def __init__(self, module: torch.nn.Linear) -> None:
        self._module = module

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        bias = self._module.bias
        wide = torch.nn.functional.linear(
            x.float(), self._module.weight.float(), None if bias is None else bias.float()
        )
        return wide.to(x.dtype)
