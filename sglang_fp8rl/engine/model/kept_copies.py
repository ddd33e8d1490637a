"""What SGLang makes of weights at their first use and keeps: right after an update too, refused, or said.

Some modules convert a weight when they first run, and keep the result: a router's weight in FP32, a norm with a
scale folded into it. No update path of SGLang renews these, so its own refit leaves them behind. A *copy* stands
beside its weight, in floating point, and varies: that values are equal is no evidence by itself. What else
appeared beside weights may be made of them, or work space: it stays as it is, and is named as unproven.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import torch

from ...errors import HostError
from ..interception import storage_of
from .held_tensors import HeldTensor, held_tensors
from .parameters import Target


class KeptCopies:
    """The copies that one model keeps.

    Args:
        modules: as SGLang built them, by name: what it wraps around them later (LoRA) is made of no weight.
        is_derived: whether a place is written by something that every update calls again.

    Attributes:
        found: of each copy, where it is kept and the weight that it follows.
        unproven: `module.attribute` of what can't be explained, and why.
    """

    def __init__(
        self, modules: Mapping[str, torch.nn.Module], is_derived: Callable[[str], bool]
    ) -> None:
        self._modules, self._is_derived = modules, is_derived
        self._weights: Sequence[Target] = ()
        self._held: list[HeldTensor] = []
        self._numbers: dict[tuple[str, int], int] = {}
        self._refusal: HostError | None = None
        self.found: dict[str, tuple[torch.Tensor, Target]] = {}
        self.unproven: dict[str, str] = {}

    def note_loaded(self, weights: Sequence[Target]) -> None:
        """What the modules hold now is as loaded; `weights` are all that updates write."""
        self._weights, self._held = weights, []
        self._held = list(self.others())
        floats = (one for one in self._held if one.tensor.is_floating_point())  # integers only count
        self._numbers = {one.memory: one.number() for one in floats}

    def others(self) -> Iterator[HeldTensor]:
        """What the modules hold beside weights, and beside what every update derives from them."""
        weights = {storage_of(target.parameter) for target in self._weights}
        for one in held_tensors(self._modules.items()):
            is_weight = one.tensor.is_meta or storage_of(one.tensor) in weights
            if not (is_weight or self._is_derived(one.place)):
                yield one

    def look(self) -> None:
        """Find what was made of the weights, as they are now, since the last look."""
        known = {storage_of(old.tensor) for old in self._held}
        numbers, self._numbers = self._numbers, {}
        self._held = list(self.others())
        for one in self._held:
            if storage_of(one.tensor) not in known:
                self._explain(one)
            elif one.memory in numbers and numbers[one.memory] != one.number():
                self._refuse(
                    one.place,
                    "changed by a forward pass",
                    "what SGLang computes from weights at their first use, it never computes again",
                    "Serve this model without updates of its weights.",
                )

    def _explain(self, one: HeldTensor) -> None:
        beside = {id(other) for other in one.beside()}
        weights = [target for target in self._weights if id(target.parameter) in beside]
        equal = [target for target in weights if _is_copy(one.tensor, target.parameter.data)]
        self.found.pop(one.place, None)
        if len(equal) > 1:
            self._refuse(
                one.place,
                f"a copy of {' or of '.join(target.name for target in equal)}",
                "these have the same values, so it is not known which one it has to follow",
                "Start the server on weights that differ.",
            )
        elif equal:
            self.found[one.place] = (one.tensor, equal[0])
        elif weights:
            why = "appeared beside weights after the load, and is no copy of one: no update writes it"
            self.unproven[one.place] = why

    def _refuse(self, *why: str) -> None:
        self._refusal = self._refusal or HostError(*why)

    def check(self) -> None:
        """Raises `HostError`, from then on always, where a look found what no update can make right."""
        if self._refusal is not None:
            raise self._refusal

    def renew(self) -> None:
        """Give every copy the values of its weight, where it lies."""
        with torch.no_grad():
            for copy, target in self.found.values():
                copy.copy_(target.parameter.data.reshape(copy.shape))


def _is_copy(made: torch.Tensor, weight: torch.Tensor) -> bool:
    if made.numel() != weight.numel() or made.device != weight.device:
        return False
    values, weight = made.reshape(-1), weight.to(made.dtype).reshape(-1)
    is_varied = made.is_floating_point() and bool((values != values[0]).any())
    return is_varied and torch.equal(values, weight)
