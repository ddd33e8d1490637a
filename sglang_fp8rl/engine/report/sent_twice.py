"""Tensors that come for a parameter which another tensor writes: a head that is tied to the embedding, a draft's copy.

They are not stored. Where the refit ends they have to be what is served, in whichever order both came.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch

from ...errors import RefitError
from ...numerics.fingerprint import MASK, box_number

_CHUNK_ELEMENTS = 1 << 21  # this much is converted at a time


class _Came(NamedTuple):
    """One part of such a tensor.

    Attributes:
        stamp: of the call that it came in.
        number: of its bytes in the dtype that they would be served in.
        served: the view of the parameter that it would be written to.
    """

    stamp: int
    number: int
    served: torch.Tensor
    rule: str


class SentTwice:
    """What came last of each such tensor."""

    def __init__(self) -> None:
        self._came: dict[str, list[_Came]] = {}

    def note(
        self,
        name: str,
        parts: Iterable[tuple[torch.Tensor, torch.Tensor]],
        *,
        stamp: int,
        rule: str,
    ) -> None:
        """A tensor came.

        Args:
            parts: of it, each with the view of the parameter that holds the same values, of the same shape.
            stamp: of the call that it came in; of the next one where it came in none.
            rule: why it has to be the same.
        """
        self._came[name] = [
            _Came(stamp, _number(sent, served.dtype), served, rule) for sent, served in parts
        ]

    def differing(self, since: int) -> tuple[str, ...]:
        """Return what is wrong with those that came at that stamp or later. Waits for a GPU."""
        return tuple(
            str(
                RefitError(
                    name,
                    "other values than are served",
                    parts[0].rule,
                    "Send the tensor that it is a copy of, with the same values, or leave this one out; if both are "
                    "trained apart, say so in the model's config (tie_word_embeddings) and start the server on that.",
                )
            )
            for name, parts in self._came.items()
            if any(
                one.stamp >= since and one.number != _number(one.served, one.served.dtype)
                for one in parts
            )
        )

    def forget(self) -> None:
        """What came was of a refit that is over."""
        self._came.clear()


def _number(matrix: torch.Tensor, dtype: torch.dtype) -> int:
    """Number the bytes of a matrix in that dtype."""
    if not matrix.numel():
        return 0
    step = max(1, _CHUNK_ELEMENTS // matrix[0].numel())
    rest, shape = (0,) * (matrix.dim() - 1), tuple(matrix.shape)
    chunks = ((at, matrix[at : at + step].to(dtype)) for at in range(0, len(matrix), step))
    return sum(box_number(chunk, shape, (at, *rest), 0) for at, chunk in chunks) & MASK
