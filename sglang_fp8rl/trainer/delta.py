"""Send only what changed: blocks whose codes or scale differ from those of the last refit.

The memory it costs is one 64-bit digest for each block: 8 bytes for 16,384 codes (a row, per channel),
so 4 MB for 8 billion blockwise weights. No codes are kept.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import torch

from ..delta_format import DELTA_SUFFIX, Delta, packed_bytes
from ..errors import RefitError
from ..numerics.blocks import block_digests, read_blocks
from ..refit_plan import RefitPlan


@dataclass
class SentState:
    """What one server holds, as digests of its blocks.

    It is `pending` until the server has taken it: `RefitClient.update_changed` calls `commit` then;
    a program with a transport of its own does it itself. `forget` makes the next refit a full one.

    Attributes:
        blocks, blocks_sent: of FP8 weights, in the last refit.
    """

    blocks: int = 0
    blocks_sent: int = 0
    _plan_digest: str = ""
    _held: dict[str, torch.Tensor] = field(default_factory=dict)
    _pending: dict[str, torch.Tensor] = field(default_factory=dict)

    def begin(self, plan: RefitPlan) -> None:
        """A refit starts. Digests of another plan's server are worth nothing."""
        if plan.digest != self._plan_digest:
            self.forget()
            self._plan_digest = plan.digest
        self._pending = {}
        self.blocks = self.blocks_sent = 0

    def commit(self) -> None:
        """The server has all that was made since `begin`."""
        self._held.update(self._pending)
        self._pending = {}

    def forget(self) -> None:
        """Nothing is known of the server any more."""
        self._held, self._pending = {}, {}

    @property
    def nbytes(self) -> int:
        """Memory that the digests take."""
        return sum(digests.nbytes for digests in self._held.values())

    def changed(self, name: str, digests: torch.Tensor) -> torch.Tensor | None:
        """Which blocks differ (int64, row by row); None if nothing is known of this weight."""
        self._pending[name] = digests
        self.blocks += digests.numel()
        held = self._held.get(name)
        if held is None:
            return None
        return torch.nonzero((digests != held.to(digests.device)).reshape(-1)).reshape(-1)


def only_changed(
    quantized: Iterable[tuple[str, torch.Tensor]], plan: RefitPlan, since: SentState
) -> Iterator[tuple[str, torch.Tensor]]:
    """Replace full FP8 weights by their changed blocks where that is less.

    Args:
        quantized: what `quantize_for_refit` yields, of full tensors (gather shards first, with
            `full_tensors`): each weight is followed by its scale.
        since: of the server that this goes to.

    Yields:
        `(NAME.fp8rl_delta, uint8)` for a weight whose last state is known and of which not nearly
        all blocks changed; else the weight and its scale. What is not FP8 is passed on.

    Raises:
        RefitError: a shard, or a weight without its scale behind it.
    """
    since.begin(plan)
    stream = iter(quantized)
    for name, codes in stream:
        entry = plan.of(name)
        if not entry.is_fp8_on_wire:
            yield name, codes
            continue
        scale_name, scale = next(stream, ("nothing", codes))
        if scale_name != entry.scale_name or type(codes) is not torch.Tensor:
            raise RefitError(
                name,
                f"a {type(codes).__name__} followed by {scale_name}",
                f"only full weights, each with {entry.scale_name} behind it, are compared",
                "Gather shards first: only_changed(full_tensors(quantize_for_refit(...)), ...).",
            )
        block = plan.block_size if entry.is_blockwise else (1, codes.shape[1])
        digests = block_digests(codes, scale, block)
        index = since.changed(name, digests)
        full = codes.numel() + 4 * scale.numel()
        if index is None or packed_bytes(digests.numel(), len(index), block) >= full:
            since.blocks_sent += digests.numel()
            yield name, codes
            yield scale_name, scale
            continue
        since.blocks_sent += len(index)
        row, column = index // digests.shape[1], index % digests.shape[1]
        blocks = read_blocks(codes, row, column, block)
        delta = Delta(digests, index, scale[row, column], blocks)
        yield name + DELTA_SUFFIX, delta.pack()
