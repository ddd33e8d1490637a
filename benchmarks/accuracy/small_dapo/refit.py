"""How an arm's weights reach its server after each step, and what that cost."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from time import perf_counter
from typing import Protocol

import torch

from sglang_fp8rl.client import RefitClient, fetch_plan
from sglang_fp8rl.errors import ConfigError
from sglang_fp8rl.numerics import quantize_blockwise
from sglang_fp8rl.trainer import quantize_for_refit

from .changes import Changed, changed

NamedTensor = tuple[str, torch.Tensor]
FAULTS = ("scale",)
FAULTY_WEIGHT = "model.layers.0.mlp.down_proj.weight"
FAULTY_FACTOR = 1.25


@dataclass(frozen=True)
class SentFigures:
    """One refit's cost.

    Attributes:
        nbytes: on the wire.
        seconds: until the server answered.
        blocks_sent: the fraction of FP8 blocks sent; 1 unless only changes were.
        changed: since the last refit, where the trainer quantizes and so can tell.
    """

    nbytes: int
    seconds: float
    blocks_sent: float = 1.0
    changed: Changed | None = None


class Sender(Protocol):
    def send(self, masters: Mapping[str, torch.Tensor]) -> SentFigures: ...


class FullSender:
    """Every FP32 master; the server quantizes."""

    def __init__(self, url: str) -> None:
        self._client = RefitClient(url)

    def send(self, masters: Mapping[str, torch.Tensor]) -> SentFigures:
        sent = self._client.update(self._tensors(masters))
        return SentFigures(sent.nbytes, sent.seconds)

    def _tensors(self, masters: Mapping[str, torch.Tensor]) -> Iterable[NamedTensor]:
        return ((name, weight.detach()) for name, weight in masters.items())


class FaultySender(FullSender):
    """For the test of the check only: one weight comes in FP8 with a scale that is 1.25 too large.

    It takes the real path of weights quantized by the trainer, and nothing in the server can know.
    """

    def _tensors(self, masters: Mapping[str, torch.Tensor]) -> Iterator[NamedTensor]:
        for name, weight in super()._tensors(masters):
            if name != FAULTY_WEIGHT:
                yield name, weight
                continue
            q, scale_inv = quantize_blockwise(weight)
            yield name, q
            yield f"{name}_scale_inv", scale_inv * FAULTY_FACTOR


class QuantizedSender:
    """FP8 and scales, made by the trainer from the server's plan; the rest as it is."""

    def __init__(self, url: str) -> None:
        self._client = RefitClient(url)
        self._plan = fetch_plan(url)
        self._last: dict[str, torch.Tensor] = {}

    def send(self, masters: Mapping[str, torch.Tensor]) -> SentFigures:
        named = ((name, weight.detach()) for name, weight in masters.items())
        began = perf_counter()
        quantized = dict(quantize_for_refit(named, self._plan))
        sent = self._client.update(quantized.items(), plan=self._plan)
        seconds = perf_counter() - began
        difference = changed(self._last, quantized) if self._last else None
        self._last = quantized
        return SentFigures(sent.nbytes, seconds, changed=difference)


def make_sender(kind: str, url: str, fault: str | None = None) -> Sender:
    """The sender of an arm (`Arm.sender`); with a `fault` the wrong one."""
    if fault is not None:
        if fault not in FAULTS or kind != "full":
            raise ConfigError(
                "--fault", fault, f"one of {', '.join(FAULTS)}, in an arm that sends masters", ""
            )
        return FaultySender(url)
    if kind == "full":
        return FullSender(url)
    if kind == "quantized":
        return QuantizedSender(url)
    raise ConfigError("sender", kind, "full or quantized", "")
