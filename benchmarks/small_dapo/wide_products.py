"""BF16 products on a CPU that has no instructions for them: the same sums, in FP32.

A BF16 product is summed in FP32 and rounded once. Without AVX-512, torch does that one element at a
time, 10 to 40 times slower than in FP32; so the operands are widened and the result is rounded here.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.overrides import TorchFunctionMode


def wide_products() -> AbstractContextManager:
    """Within it, linear layers compute in FP32 and round once, where this CPU wants it."""
    return nullcontext() if torch.ops.mkldnn._is_mkldnn_bf16_supported() else WideProducts()


class WideProducts(TorchFunctionMode):
    """Within it, they do on any CPU."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is not torch.nn.functional.linear:
            return func(*args, **kwargs)
        wide = [one.float() if isinstance(one, torch.Tensor) else one for one in args]
        return func(*wide, **kwargs).to(args[0].dtype)
