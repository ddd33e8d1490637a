"""Scales of the KV cache that the trainer sends beside its weights: a layer whose scale did not come keeps its
last one, and the status names it.
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
        module_of: the served attention module by the name that the sender has for it, or None.
    """

    def __init__(self, module_of: Callable[[str], str | None]) -> None:
        self._module_of = module_of
        self._held: dict[KvScaleName, float] = {}
        self._came: dict[KvScaleName, str] = {}  # in the last refit, and by which name
        self._kept: set[KvScaleName] = set()  # older than the weights that the choice was for

    def begin_refit(self) -> None:
        """What comes from here on is of another refit."""
        self._came = {}

    def receive(self, sent: Mapping[str, torch.Tensor], *, is_serving: bool) -> Received:
        """Read what a call brought, as `Extension.receive`. Synchronizes with the device once."""
        meant: dict[str, KvScaleName] = {}
        for name in sent:
            of = kv_scale_name(name)
            # While the checkpoint is loaded nobody knows yet which modules there are.
            if of is not None and (not is_serving or self._module_of(of.attention) is not None):
                meant[name] = of
        numbers, errors = _numbers({name: sent[name] for name in meant})
        # q gets its range from the fold of k.
        held: dict[KvScaleName, float] = {}
        first = dict(self._came)
        for name, one in numbers.items():
            if (of := meant[name]).side not in _SIDES:
                continue
            other = first.setdefault(of, name)
            known = self._held[of] if other != name and of not in held else one
            if held.setdefault(of, known) != one:
                error = RefitError(
                    name,
                    f"{one!r}, and {other} {held[of]!r}",
                    "these are two names of one scale, which has one value",
                    "The layer keeps its last scale. Send one of the two.",
                )
                errors[name] = str(error)
        held = {of: one for of, one in held.items() if of not in {meant[name] for name in errors}}
        self._held |= held
        self._came |= {of: first[of] for of in held}
        return Received(taken=[name for name in numbers if name not in errors], errors=errors)

    def largest(self, layers: Sequence[AttentionLayer]) -> torch.Tensor:
        """What each scale makes room for: FP64 `[layers, 2]`, keys and values; NaN where none came."""
        held = self._by_module(self._held)
        rows = [[held.get((one.name, side), math.nan) for side in _SIDES] for one in layers]
        return torch.tensor(rows, dtype=torch.float64) * FP8_MAX

    def note_choice(self) -> None:
        """The exponents are those of `largest` now."""
        self._kept = self._held.keys() - self._came.keys()

    def as_dict(self, layers: Sequence[AttentionLayer]) -> dict[str, Any]:
        """For the status section."""
        held, kept = self._by_module(self._held), self._by_module(self._kept)
        sides = {layer.name: {(layer.name, side) for side in _SIDES} for layer in layers}
        return {
            "unknown": [name for name, both in sides.items() if not both <= held.keys()],
            "kept": [name for name, both in sides.items() if both & kept.keys()],
        }

    def _by_module(self, names: Iterable[KvScaleName]) -> dict[tuple[str, str], float]:
        named = ((self._module_of(name.attention), name) for name in names)
        return {(at, name.side): self._held[name] for at, name in named if at is not None}


def _numbers(sent: Mapping[str, torch.Tensor]) -> tuple[dict[str, float], dict[str, str]]:
    """The value of each scale, and what is wrong with those that are none."""
    single = [name for name, one in sent.items() if one.numel() == 1 and one.is_floating_point()]
    scalars = [sent[name].detach().reshape(()).double() for name in single]
    values = dict(zip(single, torch.stack(scalars).tolist() if scalars else [], strict=True))
    good = {name: value for name, value in values.items() if 0 < value < math.inf}
    errors = {}
    for name in [one for one in sent if one not in good]:  # in one order on every rank
        described = f"{sent[name].dtype} of shape {tuple(sent[name].shape)}"
        errors[name] = str(
            RefitError(
                name,
                str(values.get(name, described)),
                "a scale of the KV cache is one number for a layer, finite and larger than zero",
                "The layer keeps its last scale. Calibrate again (amax / 448), or leave the name out and "
                "set kv_scales to 'certified'.",
            )
        )
    return good, errors
