"""KL(BF16 || a changed model) over the whole vocabulary, from the layer where they part: those before it give
what they gave in the clean model's one run.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from .samples import Batch

_AT_ONCE = 256  # rows


class CleanRun:
    """The unquantized model on all batches, and the divergence of changed models from it.

    Holds `[tokens, vocabulary]` FP32 log-probabilities and every layer's output."""

    def __init__(
        self, model: Any, layers: Sequence[torch.nn.Module], batches: Sequence[Batch]
    ) -> None:
        self._model, self._layers = model, layers
        # Of each batch: what the layers gave, and each sample's log-probabilities.
        self._runs: list[tuple[Batch, list[Any], list[torch.Tensor]]] = []
        for batch in batches:
            with _keeping(layers) as outputs:
                rows = batch.rows(_logits(model, batch))
            self._runs.append((batch, outputs, [one.float().log_softmax(-1) for one in rows]))

    def divergence(self, first_layer: int, change: AbstractContextManager) -> list[float]:
        """KL(clean || changed) of each sample, summed over its counted positions, in nats.

        Args:
            first_layer: all layers before it are as in the clean run.
            change: within it the model is another. Entered once for each batch.
        """
        sums: list[float] = []
        for batch, outputs, logprobs in self._runs:
            with _replaying(self._layers[:first_layer], outputs), change:
                rows = batch.rows(_logits(self._model, batch))
            sums += [_kl_sum(*pair) for pair in zip(logprobs, rows, strict=True)]
        return sums


def _kl_sum(clean: torch.Tensor, logits: torch.Tensor) -> float:
    """Sum over rows of KL(clean || softmax(logits)); `[n, V]` log-probabilities and logits."""
    total = 0.0
    for ours, theirs in zip(clean.split(_AT_ONCE), logits.split(_AT_ONCE), strict=True):
        gap = ours - theirs.float().log_softmax(-1)
        # exp(-inf) * (-inf + inf) of a token that a model rules out is no number; it weighs nothing.
        terms = torch.where(ours == -torch.inf, 0.0, ours.exp() * gap)
        total += float(terms.sum(-1).double().sum())
    return total


@torch.inference_mode()
def _logits(model: Any, batch: Batch) -> torch.Tensor:
    return model(input_ids=batch.ids, use_cache=False).logits


@contextlib.contextmanager
def _keeping(layers: Sequence[torch.nn.Module]) -> Iterator[list[Any]]:
    """Within it, what each layer gives is appended to the list."""
    outputs: list[Any] = []

    def keep(layer: Any, args: Any, output: Any) -> None:
        outputs.append(output)

    with contextlib.ExitStack() as hooks:
        for layer in layers:
            hooks.callback(layer.register_forward_hook(keep).remove)
        yield outputs


@contextlib.contextmanager
def _replaying(layers: Sequence[torch.nn.Module], outputs: Sequence[Any]) -> Iterator[None]:
    """Within it, these layers compute nothing and give what they gave in the clean run."""
    for layer, output in zip(layers, outputs, strict=False):
        layer.forward = functools.partial(_give, output)
    try:
        yield
    finally:
        for layer in layers:
            del layer.forward


def _give(output: Any, *args: Any, **kwargs: Any) -> Any:
    return output
