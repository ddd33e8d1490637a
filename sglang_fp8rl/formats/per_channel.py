"""One scale for each row of the local shard: for what can't be cut into blocks, or where an option asks for it."""

from __future__ import annotations

from collections.abc import Sequence

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
