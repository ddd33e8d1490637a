"""One scale for each row of the local shard: for what can't be cut into blocks, or where an option asks for it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from .format import Format


class PerChannel(Format):
    """`[N, K]` has scales of shape `[N, 1]`, `weight_scale`; they may be sent as `[N]` too.

    A row of a row-parallel shard has a scale on each rank, of its columns there.
    """

    name = "per_channel"
    block_size = (1, None)
    scale_suffix = "_scale"
    takes_any_shape = True

    def sent_scale_shapes(self, shape: Sequence[int]) -> list[tuple[int, ...]]:
        rows, one = self.grid(shape).scale_shape
        return [(rows, one), (rows,)]

    def why_not_sent(self, shape: Sequence[int], boxes: Iterable[Any]) -> str:
        wide = shape[1]
        for box in boxes:
            width = None if box is None else box.shape[-1]
            if width != wide:
                return (
                    f"per channel of a row-parallel shard: a row's scale is over "
                    f"{'other' if width is None else width} of {wide} columns, on each rank another"
                )
        return ""
