"""How an arm's weights reach its server after each step, and what that cost."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from time import perf_counter

import torch

from sglang_fp8rl.client import RefitClient
from sglang_fp8rl.errors import ConfigError
from sglang_fp8rl.numerics import quantize_blockwise
from sglang_fp8rl.trainer import quantize_for_refit

from .changes import Changed, changed

NamedTensor = tuple[str, torch.Tensor]
FAULTY_WEIGHT = "model.layers.0.mlp.down_proj.weight"
FAULTY_FACTOR = 1.25


@dataclass(frozen=True)
class SentFigures:
    """One refit's bytes on the wire, and seconds until the server answered.

    `changed` since the last refit, where the trainer quantizes and so can tell.
    """

    nbytes: int
    seconds: float
    changed: Changed | None = None


class FullSender:
    """Every FP32 master; the server quantizes."""

    def __init__(self, url: str) -> None:
        self.client = RefitClient(url)

    def send(self, masters: Mapping[str, torch.Tensor]) -> SentFigures:
        sent = self.client.update(self.tensors(masters))
        return SentFigures(sent.nbytes, sent.seconds)

    def tensors(self, masters: Mapping[str, torch.Tensor]) -> Iterable[NamedTensor]:
        return ((name, weight.detach()) for name, weight in masters.items())


class FaultySender(FullSender):
    """For the test of the check only: one weight comes in FP8 with a scale that is 1.25 too large.

    It takes the real path of weights quantized by the trainer, and nothing in the server can know.
    """

    def tensors(self, masters: Mapping[str, torch.Tensor]) -> Iterator[NamedTensor]:
        for name, weight in super().tensors(masters):
            if name != FAULTY_WEIGHT:
                yield name, weight
                continue
            q, scale_inv = quantize_blockwise(weight)
            yield name, q
            yield f"{name}_scale_inv", scale_inv * FAULTY_FACTOR


class QuantizedSender(FullSender):
    """FP8 and scales, made by the trainer from the server's plan; the rest as it is."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self._plan = self.client.plan()
        self._last: dict[str, torch.Tensor] = {}

    def send(self, masters: Mapping[str, torch.Tensor]) -> SentFigures:
        began = perf_counter()
        quantized = dict(quantize_for_refit(self.tensors(masters), self._plan))
        sent = self.client.update(quantized.items(), plan=self._plan)
        seconds = perf_counter() - began
        difference = changed(self._last, quantized) if self._last else None
        self._last = quantized
        return SentFigures(sent.nbytes, seconds, changed=difference)


# By `Arm.sender` and fault.
_SENDERS = {
    ("full", None): FullSender,
    ("full", "scale"): FaultySender,
    ("quantized", None): QuantizedSender,
}


def make_sender(kind: str, url: str, fault: str | None = None) -> FullSender:
    """The sender of an arm (`Arm.sender`); with a `fault` the wrong one."""
    if (kind, fault) not in _SENDERS:
        raise ConfigError(
            "--fault", str(fault), "`scale`, in an arm that sends masters", f"{kind} does not."
        )
    return _SENDERS[kind, fault](url)
