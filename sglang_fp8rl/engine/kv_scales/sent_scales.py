"""Scales of the KV cache that the trainer sends beside its weights.

What was sent is held until the exponents are chosen, and after that until something newer comes: a layer
whose scale did not come keeps its last one, and the status names it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from ...errors import RefitError
from ...numerics.reference import FP8_MAX
from ...wire.sent_names import KEYS, VALUES, KvScaleName, kv_scale_name
from ..extension import Received
from .attention_layers import AttentionLayer

_SIDES = (KEYS, VALUES)
IGNORED = "kv_scales is {mode!r}: this server chooses scales itself"


class SentScales:
    """Of one served model.

    Args:
        mode: the option `kv_scales`; scales are used if it is `sent`.
        module_of: the served attention module by the name that the sender has for it; None if there is
            none.

    Attributes:
        is_active: whether the server has a cache that is scaled at all.
        ignored: names that came and were not used.
        kept: modules whose exponents are of an older scale than the weights.
    """

    room = 1.0

    def __init__(self, mode: str, module_of: Callable[[str], str | None]) -> None:
        self._mode, self._module_of = mode, module_of
        self.is_active = False
        self.ignored: dict[str, None] = {}
        self.kept: list[str] = []
        self._held: dict[KvScaleName, float] = {}
        self._is_new: set[KvScaleName] = set()

    def receive(self, sent: Mapping[str, torch.Tensor], *, is_serving: bool) -> Received:
        """Read what a call brought. Synchronizes with the device once.

        Args:
            sent: by name; each a number.
            is_serving: false while the checkpoint is loaded: where nothing is scaled, it may hold scales.
        """
        found = Received()
        if is_serving and not self.is_active:
            return found  # no cache is scaled here: they are unknown names
        if self._mode != "sent":
            if is_serving:
                found.ignored = list(sent)
                self.ignored.update(dict.fromkeys(sent))
            return found
        known = {name: tensor for name, tensor in sent.items() if self._has_place(name, is_serving)}
        for name, value in _numbers(known, found.errors):
            text = _error_of(name, value)
            if text:
                found.errors[name] = text
                continue
            found.taken.append(name)
            meant = kv_scale_name(name)
            if meant is not None and meant.side in _SIDES:  # q gets its range from the fold of k
                self._held[meant] = value
                self._is_new.add(meant)
        return found

    def _has_place(self, name: str, is_serving: bool) -> bool:
        meant = kv_scale_name(name)
        # While the checkpoint is loaded, nobody knows yet which names there are.
        return meant is not None and (
            not is_serving or self._module_of(meant.attention) is not None
        )

    def largest(self, layers: Sequence[AttentionLayer]) -> torch.Tensor:
        """What each scale makes room for: FP64 `[layers, 2]`, keys and values; NaN where none came."""
        held = self._by_module(self._held)
        rows = [[held.get((one.name, side), math.nan) for side in _SIDES] for one in layers]
        return torch.tensor(rows, dtype=torch.float64) * FP8_MAX

    def adopted(self, layers: Sequence[AttentionLayer]) -> None:
        """The exponents are those of `largest` now."""
        new = self._by_module(dict.fromkeys(self._is_new, 0.0))
        old = self._by_module(self._held).keys() - new.keys()
        self.kept = [one.name for one in layers if any((one.name, s) in old for s in _SIDES)]
        self._is_new.clear()

    def _by_module(self, held: Mapping[KvScaleName, float]) -> dict[tuple[str, str], float]:
        named = ((self._module_of(meant.attention), meant.side, held[meant]) for meant in held)
        return {(module, side): value for module, side, value in named if module is not None}

    def as_dict(self, layers: Sequence[AttentionLayer]) -> dict[str, Any] | None:
        """For the status section; None where none are used and none came."""
        if self._mode != "sent":
            reason = IGNORED.format(mode=self._mode)
            return {"ignored": len(self.ignored), "reason": reason} if self.ignored else None
        known = self._by_module(self._held)
        unknown = [one.name for one in layers if any((one.name, s) not in known for s in _SIDES)]
        return {"unknown": unknown, "kept": list(self.kept)}


def _numbers(
    sent: Mapping[str, torch.Tensor], errors: dict[str, str]
) -> Iterator[tuple[str, float]]:
    """The value of each scale; what is no number of its own goes into `errors`."""
    names = []
    for name, tensor in sent.items():
        if tensor.numel() == 1 and tensor.is_floating_point():
            names.append(name)
            continue
        errors[name] = _text(
            name,
            f"{tensor.dtype} of shape {tuple(tensor.shape)}",
            "a scale of the KV cache is one floating-point number for a layer",
        )
    if names:
        stacked = torch.stack([sent[name].detach().reshape(()).double() for name in names])
        yield from zip(names, stacked.tolist(), strict=True)


def _error_of(name: str, value: float) -> str:
    if 0 < value < math.inf:
        return ""
    return _text(name, str(value), "a scale of the KV cache is finite and larger than zero")


def _text(name: str, value: str, rule: str) -> str:
    remedy = (
        "The layer keeps its last scale. Calibrate again (amax / 448), or leave the name out and set "
        "kv_scales to 'certified'."
    )
    return str(RefitError(name, value, rule, remedy))
