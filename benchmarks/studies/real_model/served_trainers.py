"""What a trainer may compute with: its own weights, those that are served, or quantized activations as well."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from small_dapo.wide_products import wide_products

from sglang_fp8rl.lab.eval.gap import rescore
from sglang_fp8rl.lab.eval.server import Rollout
from sglang_fp8rl.lab.sensitivity.quantized_products import has_pow2_activations, served_activation
from sglang_fp8rl.trainer.served_weights import (
    compute_as_served,
    compute_as_stored,
    served_modules,
)
from sglang_fp8rl.wire.plan import RefitPlan

PLAIN, SERVED, QUANTIZED = "BF16", "weights as served", "weights and activations as served"


@contextmanager
def trainer(model: Any, name: str, plan: RefitPlan | None) -> Iterator[None]:
    """Within it, `model` computes as the trainer of that name.

    `QUANTIZED` rounds the inputs of the modules that are served in FP8 as the default server does, whatever
    the server of the plan does, and computes in BF16 with what comes out.
    """
    if name == PLAIN:
        yield
        return
    assert plan is not None
    compute_as_served(model, plan)
    with ExitStack() as stack:
        stack.callback(compute_as_stored, model)
        for weights, module in served_modules(model) if name == QUANTIZED else ():
            stack.callback(_quantize_inputs(module, weights["weight"].block[1], plan).remove)
        yield


def logprobs(model: Any, rollouts: Sequence[Rollout]) -> list[torch.Tensor]:
    """(tokens,) FP32 of each."""
    with torch.no_grad(), wide_products():
        return rescore(model, rollouts)


def _quantize_inputs(module: torch.nn.Module, group: int, plan: RefitPlan) -> Any:
    pow2 = has_pow2_activations(plan)

    def hook(_: Any, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        return (served_activation(args[0], group, pow2).to(args[0].dtype), *args[1:])

    return module.register_forward_pre_hook(hook)
