"""Tensors that come for a parameter which another tensor writes: a head that is tied to the embedding, a draft's copy.

They are not stored. Where the refit ends they have to be what is served, in whichever order both came.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from ...errors import RefitError
from ...numerics.fingerprint import MASK, Box, NumberTable

_CHUNK_ELEMENTS = 1 << 21  # this much is converted at a time
_REMEDY = (
    "Send the tensor that it is a copy of, with the same values, or leave this one out. If both are trained, say so in "
    "the model's config (tie_word_embeddings), and start the server on that."
)


class SentTwice:
    """What came last of each such tensor: the stamp of its call, why it is the same, and numbers of its parts."""

    def __init__(self) -> None:
        self._came: dict[str, tuple[int, str, list[tuple[int, torch.Tensor]]]] = {}

    def note(
        self, name: str, parts: Iterable[tuple[torch.Tensor, torch.Tensor]], stamp: int, rule: str
    ) -> None:
        """A tensor came; `parts` of it, each with the view of the parameter that has to hold the same values."""
        numbers = [(_number(sent, served.dtype), served) for sent, served in parts]
        self._came[name] = stamp, rule, numbers

    def differing(self, since: int) -> tuple[str, ...]:
        """Return what is wrong with those that came at that stamp or later. Waits for a GPU."""
        return tuple(
            str(RefitError(name, "other values than are served", rule, _REMEDY))
            for name, (stamp, rule, numbers) in self._came.items()
            if stamp >= since
            and any(number != _number(served, served.dtype) for number, served in numbers)
        )

    def forget(self) -> None:
        """What came was of a refit that is over."""
        self._came.clear()


def _number(matrix: torch.Tensor, dtype: torch.dtype) -> int:
    """Number the bytes of a matrix in that dtype."""
    step = max(1, _CHUNK_ELEMENTS // max(1, matrix[:1].numel()))
    rest, shape = (0,) * (matrix.dim() - 1), tuple(matrix.shape)
    boxes = (
        Box(matrix[at : at + step].to(dtype), shape, (at, *rest), 0)
        for at in range(0, len(matrix), step)
    )
    return sum(NumberTable([[box]]).numbers()[0] for box in boxes) & MASK
