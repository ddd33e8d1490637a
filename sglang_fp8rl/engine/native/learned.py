"""What SGLang's own layers do with tensors that are alike: seen once, and not run again from then on.

Their loaders choose a part of the tensor and a place for it by their arguments. To watch that choice for each of
18,000 experts is most of what an update costs whose layout is not replayed; and the first one too would
cost it, but that the load at startup has shown it.
"""

from __future__ import annotations

from array import array
from typing import Any, NamedTuple

import torch

from ...numerics.backends import has_kernel
from ...numerics.write_table import FIELD, WIDE, Piece
from ..interception import Region, Write, extent_of, storage_of, unwatched
from ..model.parameters import Target
from .matrix_writes import matrix_writes, row_of
from .observer import LoaderWrites

# Where the loaders are that were read, in all supported versions: they keep nothing, leave no word to others, and
# take floats of 16 and of 32 bits alike. Those of experts in high precision may turn them back first.
# Those of models may: DeepSeek-V4's host table tells its ranks of a write, and they wait for one another.
_LAYERS = (
    "sglang.srt.layers.linear",
    "sglang.srt.layers.moe.fused_moe_triton.layer",
    "sglang.srt.layers.vocab_parallel_embedding",
)
# Arguments that are the same if they are equal. Not `bool`, which equals numbers.
_VALUES = (str, int, type(None))


class _Copy(NamedTuple):
    """A write without its source; `part` has offset, shape and strides of that in what came, and is None of a fill."""

    part: tuple[int, tuple[int, ...], tuple[int, ...]] | None
    write: Write

    def of(self, loaded: torch.Tensor) -> Write:
        return self.write._replace(source=self._part_of(loaded))

    def _part_of(self, loaded: torch.Tensor) -> torch.Tensor | None:
        if self.part is None:
            return None
        if self.part == (0, loaded.shape, loaded.stride()):
            return loaded
        offset, shape, stride = self.part
        return loaded.as_strided(shape, stride, loaded.storage_offset() + offset)


class Rows(NamedTuple):
    """The writes of a loader as rows of a table.

    Attributes:
        fields: int64, of each row as `Piece.row` gives them; a source is an offset in bytes from the tensor that came.
        size: how many they are.
        regions: of the parameter, that are written.
    """

    fields: bytes
    size: int
    regions: tuple[Region, ...]


class LearnedLoader:
    """What a loader does with tensors of one shape and strides, for the same arguments."""

    def __init__(self, copies: list[_Copy]) -> None:
        self._copies = copies
        # For which layout of the target and dtype it was looked up, and as which rows.
        self._rows: tuple[tuple, Rows | None] = (), None

    def writes(self, loaded: torch.Tensor) -> list[Write]:
        """What it would write."""
        with unwatched():
            return [one.of(loaded) for one in self._copies]

    def rows(self, target: Target, layout: tuple, name: str, loaded: torch.Tensor) -> Rows | None:
        """The same as rows of a table; None where it has to be done write by write.

        Args:
            layout: where the target lies by now.

        Raises:
            RefitError: as `matrix_writes`.
        """
        wanted = layout, loaded.dtype
        known, rows = self._rows
        if known != wanted:
            with unwatched():
                rows = self._as_rows(target, name, loaded)
            self._rows = wanted, rows
        return rows

    def _as_rows(self, target: Target, name: str, loaded: torch.Tensor) -> Rows | None:
        fields, count = array("q"), 0
        regions: list[Region] = []
        for write in self.writes(loaded):
            if write.source is None or write.region is None:
                return None
            for piece in matrix_writes(target, name, write):
                row = row_of(piece, (0, piece.source.data_ptr() - loaded.data_ptr()))
                # Of a long row a table makes several, which would be refused one by one.
                is_cut = row is not None and row[FIELD["cols"]] != (piece.source.shape or (1,))[-1]
                if row is None or is_cut or not _has_kernel(piece):
                    return None
                fields.extend(row)
                count += 1
            if any(map(write.region.overlaps, regions)):  # rows of a table have no order
                return None
            regions.append(write.region)
        return Rows(fields.tobytes(), count, tuple(regions))


def _has_kernel(piece: Piece) -> bool:
    columns = (piece.source.shape or (1,))[-1]
    block = (1, columns) if piece.scales is None else piece.block  # any table copies rows
    return has_kernel(piece.destination.device, block, columns)


class LearnedLoaders:
    """The loaders that are known.

    That a loader copies and asks for no value is seen. That only its arguments decide what it does is
    assumed, as for a recipe (`Target.is_repeatable`).
    """

    def __init__(self) -> None:
        self._known: dict[tuple, LearnedLoader] = {}

    def key_of(
        self, target: Target, native: Any, loaded: torch.Tensor, args: tuple, kwargs: dict
    ) -> tuple | None:
        """What a loader call is known by; None if what it does can't be learnt."""
        is_read = getattr(native, "__module__", "") in _LAYERS and target.is_repeatable
        is_read = is_read and (target.is_fp8 or not target.has_experts)
        if not is_read or not all(type(one) in _VALUES for one in (*args, *kwargs.values())):
            return None
        given = (*args, *sorted(kwargs.items()))
        dtype = torch.float32 if loaded.dtype in WIDE else loaded.dtype
        return target.index, given, dtype, loaded.shape, loaded.stride()

    def known(self, key: tuple | None) -> LearnedLoader | None:
        """What the loader does; None where it has to run."""
        return None if key is None else self._known.get(key)

    def note(self, key: tuple, loaded: torch.Tensor, found: LoaderWrites) -> None:
        """Learn what the loader did with that tensor."""
        if found.is_more or not all(_is_of(one.source, loaded) for one in found.writes):
            return
        self._known[key] = LearnedLoader([_copy(one, loaded) for one in found.writes])


def _is_of(source: torch.Tensor | None, loaded: torch.Tensor) -> bool:
    """Whether it is a part of that tensor; a loader may write what it made, or another one in that storage."""
    if source is None:
        return True
    if source.dtype != loaded.dtype or storage_of(source) != storage_of(loaded):
        return False
    (start, end), (first, last) = extent_of(loaded), extent_of(source)
    return start <= first and last <= end


def _copy(write: Write, loaded: torch.Tensor) -> _Copy:
    source, part = write.source, None
    if source is not None:
        offset = int(source.storage_offset()) - int(loaded.storage_offset())
        part = offset, tuple(source.shape), source.stride()
    return _Copy(part, write._replace(source=None))
