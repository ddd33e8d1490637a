"""What SGLang makes of weights at their first use and keeps: right after an update too, or refused.

Some modules convert a weight when they first run, and keep the result: a router's weight in FP32, a
norm with a scale folded into it. No update path of SGLang renews these, so its own refit leaves them
behind. They are found by looking, once, before the first update is stored: what the modules hold by
then is compared with what they held when the model was loaded. What appeared since then and is no copy of
any weight is a cache or work space: updates leave it as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import takewhile

import torch

from ...errors import HostError
from ...numerics.fingerprint import tensor_number
from .parameters import Target, held_tensors


class KeptCopies:
    """The copies that one model keeps.

    Args:
        is_derived: whether a place is written by something that every update calls again.

    Attributes:
        as_loaded: what the modules held when loaded, each with its number; None once that was compared.
    """

    def __init__(self, model: torch.nn.Module, is_derived: Callable[[str], bool]) -> None:
        self._model, self._is_derived = model, is_derived
        self.as_loaded: dict[str, tuple[torch.Tensor, int]] | None = None
        self._copies: dict[str, tuple[torch.Tensor, Target]] = {}

    def places(self) -> Iterator[tuple[str, torch.Tensor]]:
        """`(module.attribute, copy)` of every copy that was found."""
        return ((place, copy) for place, (copy, _) in self._copies.items())

    def note_loaded(self, written: Iterable[Target]) -> None:
        """Begin anew with what the modules hold now, but for `written`, which every update writes again."""
        self.as_loaded = {
            place: (one, tensor_number(one.detach(), 0)) for place, one in self._held(written)
        }
        self._copies = {}

    def look(self, written: list[Target]) -> None:
        """Find what was made since then; once.

        Raises:
            HostError: a tensor that was changed in place, or that could be a copy of either of two.
        """
        before, self.as_loaded = self.as_loaded or {}, None
        for place, one in self._held(written):
            old = before.get(place)
            if old is None or old[0] is not one:
                self._explain(place, one, written)
            elif old[1] != tensor_number(one.detach(), 0) and not self._is_derived(place):
                raise HostError(
                    place,
                    "changed by a forward pass",
                    "what SGLang computes from weights at their first use, it never computes again",
                    "Serve this model without updates of its weights.",
                )

    def _explain(self, place: str, made: torch.Tensor, candidates: list[Target]) -> None:
        equal = [target for target in candidates if _is_copy(made, target.parameter.data)]
        shared = [_levels_shared(place, target.name) for target in equal]
        nearest = [one for one, count in zip(equal, shared, strict=True) if count == max(shared)]
        if len(nearest) > 1:
            raise HostError(
                place,
                f"a copy of {' or of '.join(target.name for target in nearest)}",
                "these have the same values, so it is not known which one it has to follow",
                "Start the server on weights that differ.",
            )
        if nearest:
            self._copies[place] = (made, nearest[0])

    def renew(self) -> None:
        """Give every copy the values of its weight, where it lies."""
        with torch.no_grad():
            for copy, target in self._copies.values():
                copy.copy_(target.parameter.data.reshape(copy.shape))

    def _held(self, written: Iterable[Target]) -> Iterator[tuple[str, torch.Tensor]]:
        """All that the modules hold, but for `written`."""
        known = {id(target.parameter) for target in written}
        found = {**dict(self._model.named_parameters()), **dict(held_tensors(self._model))}
        for place, one in found.items():
            if one.device.type != "meta" and id(one) not in known:
                yield place, one


def _is_copy(made: torch.Tensor, weight: torch.Tensor) -> bool:
    return (
        made.numel() == weight.numel()
        and made.device == weight.device
        and torch.equal(made.reshape(-1), weight.to(made.dtype).reshape(-1))
    )


def _levels_shared(place: str, name: str) -> int:
    """How many levels of the model two places share."""
    levels = zip(place.split("."), name.split("."), strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], levels))
