"""What a loader does with tensors that are alike: seen twice, and not run again from then on.

SGLang's loaders choose a part of the tensor and a place for it by their arguments. Where a layout is not
replayed (it comes in other buckets each time, or with a tensor with which SGLang computes) two thirds of
what an update costs would be to watch that choice for each of 18,000 experts, every time.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

import torch

from ..arrival.bucket import alone
from ..interception import Write, storage_of, unwatched
from ..model.parameters import Target
from .observer import LoaderWrites

# Arguments that are the same if they are equal, and stay what they are.
_VALUES = (str, int, type(None))


@dataclass(frozen=True)
class _Copy:
    """A write of what a loader was given: `part` of that, its offset, shape and strides; None of a fill."""

    write: Write
    part: tuple[int, tuple[int, ...], tuple[int, ...]] | None

    def of(self, loaded: torch.Tensor) -> Write:
        if self.part is None:
            return self.write
        offset, shape, stride = self.part
        source = loaded.as_strided(shape, stride, loaded.storage_offset() + offset)
        write = self.write
        return Write(source, write.fill, write.offset, write.shape, write.stride, write.region)


class Trial:
    """One run of a loader that may be learnt from.

    Attributes:
        tensor: what to give it: the memory that was sent, held by nobody else, so that one who keeps it is seen.
    """

    def __init__(self, key: tuple, loaded: torch.Tensor) -> None:
        self.key = key
        with unwatched():
            self.tensor = alone(loaded)
        self._holders = self._count_holders()

    def copies(self, found: LoaderWrites) -> tuple[_Copy, ...]:
        """What it did, without the tensor; nothing if it did anything besides."""
        held = sum(one.source is not None for one in found.writes)
        objects, views = self._holders
        is_kept = self._count_holders() != (objects, views + held)
        if found.is_more or is_kept or not held:
            return ()
        copies = [self._copy(one) for one in found.writes]
        return tuple(one for one in copies if one is not None) if all(copies) else ()

    def _copy(self, write: Write) -> _Copy | None:
        source, tensor = write.source, self.tensor
        if source is None:
            return _Copy(write, None)
        if source.dtype != tensor.dtype or storage_of(source) != storage_of(tensor):
            return None  # of what came in another call
        offset = int(source.storage_offset()) - int(tensor.storage_offset())
        bare = Write(None, write.fill, write.offset, write.shape, write.stride, write.region)
        return _Copy(bare, (offset, tuple(source.shape), source.stride()))

    def _count_holders(self) -> tuple[int, int]:
        """How many have the tensor, and how many tensors have its memory."""
        return sys.getrefcount(self.tensor), torch._C._storage_Use_Count(storage_of(self.tensor))


class LearnedLoaders:
    """What loaders did with contiguous tensors of one dtype and shape, for one part of one target.

    That a loader copies, keeps nothing and asks for no value is seen. That only its arguments decide
    what it does is assumed, as for a recipe (`Target.is_repeatable`), of what did the same twice.
    """

    def __init__(self) -> None:
        self._once: dict[tuple, tuple[_Copy, ...]] = {}
        self._twice: dict[tuple, tuple[_Copy, ...]] = {}

    def again(self, target: Target, part: tuple, loaded: torch.Tensor) -> list[Write] | None:
        """What the loader would write; None where it has to run."""
        copies = self._twice.get(_key(target, part, loaded))
        if copies is None or not loaded.is_contiguous():
            return None
        with unwatched():
            return [one.of(loaded) for one in copies]

    def trial(self, target: Target, part: tuple, loaded: torch.Tensor) -> Trial | None:
        """A run to learn from; None if nothing can be."""
        is_plain = type(loaded) is torch.Tensor and not loaded.__dict__ and loaded.is_contiguous()
        are_values = all(isinstance(one, _VALUES) for one in part)
        if not (is_plain and are_values and target.is_repeatable):
            return None
        return Trial(_key(target, part, loaded), loaded)

    def note(self, trial: Trial, found: LoaderWrites) -> None:
        """Behind a trial: learn what the loader did."""
        copies = trial.copies(found)
        if copies and self._once.get(trial.key) == copies:
            self._twice[trial.key] = copies
        self._once[trial.key] = copies


def _key(target: Target, part: tuple, loaded: torch.Tensor) -> tuple:
    return target.index, part, loaded.dtype, loaded.shape
