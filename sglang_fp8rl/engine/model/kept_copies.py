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
from .parameters import HeldTensor, Target, held_tensors


class KeptCopies:
    """The `copies` that one model keeps since it was loaded, and `unproven`: what else appeared, and why it is named.

    Args:
        modules: as SGLang built them, by name: what it wraps around them later (LoRA) is made of no weight.
        weights: all that updates write.
        is_derived: whether a place is written by something that every update calls again.
    """

    def __init__(
        self,
        modules: Mapping[str, torch.nn.Module],
        weights: Sequence[Target],
        is_derived: Callable[[str], bool],
        has_run: Callable[[], bool],
    ) -> None:
        self._modules, self._weights = modules, weights
        self._is_derived, self._has_run = is_derived, has_run
        self.copies: dict[str, tuple[torch.Tensor, Target]] = {}
        self._refused: tuple[str, str, str, str] | None = None
        self._looked_behind: bool | None = None
        self.unproven: dict[str, str] = {}
        self._constants: list[tuple[torch.Tensor, torch.Tensor]] = []
        # By place and memory; with its number as loaded, until a look behind a forward pass compared it.
        self._known: dict[tuple[str, int], tuple[HeldTensor, int] | None] = {
            one.memory: _numbered(one) for one in self.others()
        }

    def others(self) -> Iterator[HeldTensor]:
        """What the modules hold beside weights, and beside what every update derives from them."""
        weights = {storage_of(target.parameter) for target in self._weights}
        for one in held_tensors(self._modules.items()):
            is_weight = one.tensor.is_meta or storage_of(one.tensor) in weights
            if not (is_weight or self._is_derived(one.place)):
                yield one

    def check(self) -> None:
        """Look before the first update, and before the first behind a forward pass.

        Raises:
            HostError: any look found what no update may leave behind.
        """
        has_run = self._has_run()
        if self._looked_behind is not has_run:
            self.look()
            self._looked_behind = has_run
        if self._refused is not None:
            raise HostError(*self._refused)  # a new one: what is raised keeps what its callers held

    def look(self) -> None:
        """Find what was made since the last look of the weights, which are still the same; a refusal stays."""
        known, self._known = self._known, {}
        has_run = self._has_run()
        for one in self.others():
            numbered = known.get(one.memory)
            self._known[one.memory] = None if has_run else numbered
            if one.memory not in known:
                self._explain(one)
            elif numbered is not None and numbered[1] != one.number():
                self._refused = (
                    one.place,
                    "changed by a forward pass",
                    "what SGLang computes from weights at their first use, it never computes again",
                    "Serve this model without updates of its weights.",
                )

    def number_again(self) -> None:
        """Weights changed, or came back from a release: as long as nothing has run, all is as it should be."""
        for memory, numbered in () if self._has_run() else self._known.items():
            if numbered is not None and numbered[0].memory == memory:
                self._known[memory] = _numbered(numbered[0])

    def keep_constants(self) -> None:
        """The weights' memory is about to be given back, or filled with rubbish: look while it is there, and copy to the
        CPU what no update sends. What plain objects hold was not made with the model."""
        self.look()
        self._constants = [
            (one.tensor.detach(), one.tensor.detach().to("cpu", copy=True))
            for one in self.others()
            if isinstance(one.holder, torch.nn.Module)
        ]

    def put_constants_back(self) -> None:
        """Give memory that came back, or was filled, what `keep_constants` copied."""
        for one, kept in self._constants:
            one.copy_(kept)
        self._constants = []
        self.number_again()

    def _explain(self, one: HeldTensor) -> None:
        beside = one.beside
        weights = [target for target in self._weights if id(target.parameter) in beside]
        equal = [target for target in weights if _is_copy(one.tensor, target.parameter.data)]
        if len(equal) > 1:
            self._refused = (
                one.place,
                f"a copy of {' or of '.join(target.name for target in equal)}",
                "these have the same values, so it is not known which one it has to follow",
                "Start the server on weights that differ: those of a checkpoint, for dummy ones of a size are alike.",
            )
        elif equal:
            self.copies[one.place] = (one.tensor, equal[0])
        elif weights:
            self.unproven[one.place] = "appeared beside weights after the load, is no copy of one"

    @torch.no_grad()
    def renew(self) -> None:
        """Give every copy the values of its weight, where it lies."""
        for copy, target in self.copies.values():
            copy.copy_(target.parameter.data.reshape(copy.shape))
        self.number_again()


def _numbered(one: HeldTensor) -> tuple[HeldTensor, int] | None:
    number = one.number()
    return None if number is None else (one, number)


def _is_copy(made: torch.Tensor, weight: torch.Tensor) -> bool:
    if not made.is_floating_point() or made.numel() != weight.numel():
        return False
    values, others = (one.to(made).float().reshape(-1) for one in (made, weight))
    return bool((values != values[:1]).any()) and torch.equal(values, others)
