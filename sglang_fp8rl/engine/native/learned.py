"""What SGLang's own layers do with tensors that are alike: seen twice, and not run again from then on.

Their loaders choose a part of the tensor and a place for it by their arguments. Where a layout is not
replayed (it comes in other buckets each time, or with a tensor with which SGLang computes) two thirds of
what an update costs would be to watch that choice for each of 18,000 experts, every time.
"""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

import torch

from ..interception import Places, Write, offset_within, span_of, unwatched
from ..model.parameters import Target
from .matrix_writes import places_of
from .observer import LoaderWrites

# Where the loaders are that were read, in all supported versions: they keep nothing, and leave no word to others.
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

    def of(self, loaded: torch.Tensor, places: Places) -> Write:
        return self.write._replace(source=self._part_of(loaded), places=places)

    def _part_of(self, loaded: torch.Tensor) -> torch.Tensor | None:
        if self.part is None:
            return None
        if self.part == (0, loaded.shape, loaded.stride()):
            return loaded
        offset, shape, stride = self.part
        return loaded.as_strided(shape, stride, loaded.storage_offset() + offset)


class LearnedLoader:
    """What a loader does with tensors of one dtype, shape and strides, for the same arguments."""

    def __init__(self, copies: list[_Copy]) -> None:
        self._copies = copies
        # Where they go, looked up for a target of that layout.
        self._layout: tuple = ()
        self._places: list[Places] = []

    def writes(self, target: Target, loaded: torch.Tensor) -> list[Write]:
        """What it would write."""
        are_known = self._layout == target.layout
        places = self._places if are_known else itertools.repeat(())
        with unwatched():
            return [one.of(loaded, where) for one, where in zip(self._copies, places)]  # noqa: B905

    def place(self, target: Target) -> None:
        """Look up where its writes go, behind some that were not refused."""
        with unwatched():
            self._places = [places_of(target, target.name, one.write) for one in self._copies]
        self._layout = target.layout


class LearnedLoaders:
    """The loaders that did the same twice.

    That a loader copies and asks for no value is seen. That only its arguments decide what it does is
    assumed, as for a recipe (`Target.is_repeatable`), of what did the same twice.
    """

    def __init__(self) -> None:
        # Hashes: most layouts are replayed, and need no second time.
        self._once: dict[int, int] = {}
        self._twice: dict[tuple, LearnedLoader] = {}

    def key_of(
        self, target: Target, native: Any, loaded: torch.Tensor, args: tuple, kwargs: dict
    ) -> tuple | None:
        """What a loader call is known by; None if what it does can't be learnt."""
        is_read = getattr(native, "__module__", "") in _LAYERS and target.is_repeatable
        if not is_read or not all(type(one) in _VALUES for one in (*args, *kwargs.values())):
            return None
        given = (*args, *sorted(kwargs.items()))
        return target.index, given, loaded.dtype, loaded.shape, loaded.stride()

    def known(self, key: tuple | None) -> LearnedLoader | None:
        """What the loader does; None where it has to run."""
        return None if key is None else self._twice.get(key)

    def note(self, key: tuple, loaded: torch.Tensor, found: LoaderWrites) -> None:
        """Learn what the loader did with that tensor."""
        if found.is_more or not all(_is_of(one.source, loaded) for one in found.writes):
            return
        copies = [_copy(one, loaded) for one in found.writes]
        before, now = self._once.get(hash(key)), hash(tuple(copies))
        self._once[hash(key)] = now
        if before == now:
            self._twice[key] = LearnedLoader(copies)


def _is_of(source: torch.Tensor | None, loaded: torch.Tensor) -> bool:
    """Whether it is a part of that tensor; a loader may write what it made, or another one in that storage."""
    if source is None:
        return True
    return source.dtype == loaded.dtype and offset_within(span_of(loaded), source) is not None


def _copy(write: Write, loaded: torch.Tensor) -> _Copy:
    source, part = write.source, None
    if source is not None:
        offset = int(source.storage_offset()) - int(loaded.storage_offset())
        part = offset, tuple(source.shape), source.stride()
    return _Copy(part, write._replace(source=None))
