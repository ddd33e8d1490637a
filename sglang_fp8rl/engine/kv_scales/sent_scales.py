"""Scales of the KV cache that the trainer sends beside its weights.

What was sent is held until the exponents are chosen, and after that until something newer comes: a layer
whose scale did not come keeps its last one, and the status names it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from ...errors import RefitError
from ...numerics.reference import FP8_MAX
from ...wire.sent_names import KEYS, VALUES, KvScaleName, kv_scale_name
from ..extension import Received
from .attention_layers import AttentionLayer

_SIDES = (KEYS, VALUES)


class SentScales:
    """Of one served model that uses them.

    Args:
        module_of: the served attention module by the name that the sender has for it; None if there is
            none.
    """

    def __init__(self, module_of: Callable[[str], str | None]) -> None:
        self._module_of = module_of
        self._held: dict[KvScaleName, float] = {}
        self._new: set[KvScaleName] = set()  # since the choice
        self._kept: set[KvScaleName] = set()  # older than the weights that the choice was for

    def receive(self, sent: Mapping[str, torch.Tensor], *, is_serving: bool) -> Received:
        """Read what a call brought. Synchronizes with the device once.

        Args:
            sent: by name; each a number.
            is_serving: false while the checkpoint is loaded, when nobody knows yet which modules there are.
        """
        names = ((name, kv_scale_name(name)) for name in sent)
        meant = {
            name: of
            for name, of in names
            if of is not None and (not is_serving or self._module_of(of.attention) is not None)
        }
        found = Received()
        values = _numbers({name: sent[name] for name in meant}, found.errors)
        found.taken += values
        # q gets its range from the fold of k.
        held = {meant[name]: value for name, value in values.items() if meant[name].side in _SIDES}
        self._held |= held
        self._new |= held.keys()
        return found

    def largest(self, layers: Sequence[AttentionLayer]) -> torch.Tensor:
        """What each scale makes room for: FP64 `[layers, 2]`, keys and values; NaN where none came."""
        held = self._by_module(self._held)
        rows = [[held.get((one.name, side), math.nan) for side in _SIDES] for one in layers]
        return torch.tensor(rows, dtype=torch.float64) * FP8_MAX

    def note_choice(self) -> None:
        """The exponents are those of `largest` now."""
        self._kept, self._new = self._held.keys() - self._new, set()

    def as_dict(self, layers: Sequence[AttentionLayer]) -> dict[str, Any]:
        """For the status section."""
        held, kept = self._by_module(self._held), self._by_module(self._kept)
        return {
            "unknown": [
                one.name for one in layers if any((one.name, s) not in held for s in _SIDES)
            ],
            "kept": [one.name for one in layers if any((one.name, s) in kept for s in _SIDES)],
        }

    def _by_module(self, names: Iterable[KvScaleName]) -> dict[tuple[str, str], float]:
        named = ((self._module_of(name.attention), name) for name in names)
        return {(at, name.side): self._held[name] for at, name in named if at is not None}


def _numbers(sent: Mapping[str, torch.Tensor], errors: dict[str, str]) -> dict[str, float]:
    """The value of each scale; what is none goes into `errors`."""
    single = [name for name, one in sent.items() if one.numel() == 1 and one.is_floating_point()]
    scalars = [sent[name].detach().reshape(()).double() for name in single]
    values = torch.stack(scalars).tolist() if scalars else []
    for name, value in zip(single, values, strict=True):
        if not 0 < value < math.inf:
            rule = "a scale of the KV cache is finite and larger than zero"
            errors[name] = _text(name, str(value), rule)
    for name in sent.keys() - single:
        what = f"{sent[name].dtype} of shape {tuple(sent[name].shape)}"
        rule = "a scale of the KV cache is one floating-point number for a layer"
        errors[name] = _text(name, what, rule)
    return {name: one for name, one in zip(single, values, strict=True) if name not in errors}


def _text(name: str, value: str, rule: str) -> str:
    remedy = (
        "The layer keeps its last scale. Calibrate again (amax / 448), or leave the name out and set "
        "kv_scales to 'certified'."
    )
    return str(RefitError(name, value, rule, remedy))
