"""Which sent tensors something was made of: a view leads back to the name it was sent under, a copy as well."""

from __future__ import annotations

import bisect
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from operator import attrgetter
from typing import NamedTuple

import torch

from ...formats import weight_name_of
from ...wire.sent_names import kv_scale_name
from ..interception import offset_within, span_of, storage_of, unwatched

_ADDRESS = attrgetter("address")
# SGLang's mark of a checkpoint's tensor whose memory the next one gets (`runai_streamer`).
_REUSED = "_sglang_runai_streamer_tensor"


@dataclass(eq=False)
class Source:
    """One tensor of an update, as it was sent: the one at that `position`.

    Attributes:
        weight_name: the name the model is given: the tensor's own, or for a scale its weight's.
        tensor: None once it was let go of; where it was and how it looked stays known.
    """

    name: str
    tensor: torch.Tensor | None
    weight_name: str
    position: int

    def __post_init__(self) -> None:
        tensor = self.tensor
        assert tensor is not None
        self.shape, self.dtype = tuple(tensor.shape), tensor.dtype
        self.is_meta = tensor.device.type == "meta"
        self.address, self.end_address = span_of(tensor)

    @property
    def is_scale(self) -> bool:
        return self.name != self.weight_name

    def offset_of(self, view: torch.Tensor) -> int | None:
        """Elements from the tensor's start to that of a view of it; None if it is no view of it."""
        if view.dtype != self.dtype:
            return None
        if self.is_meta:  # there, addresses are alike; it holds no memory, and is kept
            assert self.tensor is not None
            if storage_of(view) != storage_of(self.tensor):
                return None
        return offset_within((self.address, self.end_address), view)


class Made(NamedTuple):
    """What a tensor was made of.

    Attributes:
        sources: the sent tensors whose values are in it; empty if none is known.
        is_view: whether it is a view of one of them, so that the same view of another bucket is its like.
    """

    sources: tuple[Source, ...]
    is_view: bool

    @property
    def name(self) -> str:
        """Of the first; empty if none is known."""
        return self.sources[0].name if self.sources else ""

    @property
    def is_scale(self) -> bool:
        return bool(self.sources) and self.sources[0].is_scale


UNKNOWN = Made((), False)


class SourceIndex:
    """Watches the `(name, tensor)` pairs of an update go by and says what a tensor was made of.

    Models rename, split and stack while they load, and some hand experts to a thread pool, so
    neither the name nor the object survives until a parameter is written. The memory does: a
    view lies inside that of the tensor it was taken from, and of what an operation made anew
    (a transpose that was copied, several tensors joined) `derive` is told.

    Args:
        keeps_tensors: hold every tensor until `forget_tensors`. A checkpoint is not held: a tensor
            is let go of when the next one is asked for, unless it may be fused experts that no
            loader has taken so far (`left`).

    Attributes:
        consumed: names that reached the model.
        set_aside: scales of the KV cache, by name: no model is given them.
        native: sent tensors of which more than copies was made, and what.
        unsourced: reasons why the call as a whole is more than copies of what was sent.
    """

    def __init__(self, keeps_tensors: bool = True) -> None:
        self._keeps_tensors = keeps_tensors
        self.names: list[str] = []
        self.nbytes = 0
        self.consumed: set[str] = set()
        self.set_aside: dict[str, torch.Tensor] = {}
        self.native: dict[Source, str] = {}
        self.unsourced: dict[str, None] = {}
        self._sources: list[Source] = []  # by address
        # A tensor on `meta` has no address, but a storage (and this keeps it alive).
        self._on_meta: dict[int, Source] = {}
        # Storages that hold values of sent tensors, though none of their memory.
        self._derived: dict[int, tuple[Source, ...]] = {}
        self._lock = threading.Lock()

    def watch(
        self, weights: Iterable[tuple[str, torch.Tensor]]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Pass the pairs on, remembering them.

        A scale goes by under the name of its weight, so that it meets the same loader with the
        same shard or expert. Models may not know its own name: SGLang's Llama renames
        `weight_scale_inv` to `weight_scale` and then drops what it can't find.
        """
        for name, tensor in weights:
            # Strided ones may lie in each other's gaps; of a lazily negated one the memory has the other sign.
            tensor = tensor.contiguous().resolve_neg()
            with self._lock:
                position = len(self.names)
                self.names.append(name)
                self.nbytes += tensor.nbytes
                if name.endswith("_scale") and kv_scale_name(name) is not None:
                    self.set_aside[name] = tensor if self._keeps_tensors else _copied(tensor)
                    continue
                source = Source(name, tensor, weight_name_of(name), position)
                self._remember(source, tensor)
            yield source.weight_name, tensor
            if not self._keeps_tensors and not source.is_meta:
                with self._lock:
                    if source.name in self.consumed or len(source.shape) != 3:
                        source.tensor = None
                    elif getattr(tensor, _REUSED, False):
                        source.tensor = _copied(tensor)
            del tensor

    def _remember(self, source: Source, tensor: torch.Tensor) -> None:
        storage = storage_of(tensor)
        self._derived.pop(storage, None)
        if source.is_meta:
            self._on_meta[storage] = source
            return
        first, end = self._who_had(source.address, source.end_address)
        self._sources[first:end] = [source]

    def _who_had(self, address: int, end_address: int) -> tuple[int, int]:
        """Which sources are gone where this memory is another's now, first and behind the last of them."""
        first = bisect.bisect_left(self._sources, address, key=_ADDRESS)
        end = bisect.bisect_right(self._sources, address, lo=first, key=_ADDRESS)
        if not self._keeps_tensors:  # they come and go, and their memory is used again
            if first and self._sources[first - 1].end_address > address:
                first -= 1
            end = max(end, bisect.bisect_left(self._sources, end_address, lo=first, key=_ADDRESS))
        return first, end

    def made_of(self, tensor: torch.Tensor) -> Made:
        """What `tensor` was made of."""
        with self._lock:
            derived = self._derived.get(storage_of(tensor))
            if derived is not None:
                return Made(derived, False)
            source = self._holder_of(tensor)
        return UNKNOWN if source is None else Made((source,), True)

    def _holder_of(self, view: torch.Tensor) -> Source | None:
        """The sent tensor in whose memory a view begins."""
        if view.device.type == "meta":
            return self._on_meta.get(storage_of(view))
        address = view.data_ptr()
        at = bisect.bisect_right(self._sources, address, key=_ADDRESS) - 1
        found = self._sources[at] if at >= 0 else None
        return found if found is not None and address < found.end_address else None

    def derive(
        self, made: torch.Tensor, sources: tuple[Source, ...], *, adds: bool = False
    ) -> None:
        """`made` has values of these sent tensors from now on; of none if there are none.

        Args:
            adds: to those that it had before (a part of it was written).
        """
        storage = storage_of(made)
        with self._lock:
            if not adds and not self._keeps_tensors and made.device.type != "meta":
                first, end = self._who_had(*span_of(made))
                del self._sources[first:end]
            if adds and self._holder_of(made) is not None:  # in the sender's memory
                return
            had = self._derived.pop(storage, ())
            sources = (*had, *sources) if adds else sources
            if sources:
                self._derived[storage] = tuple(dict.fromkeys(sources))

    def consume(self, sources: Iterable[Source]) -> None:
        """These reached the model."""
        with self._lock:
            self.consumed.update(source.name for source in sources)

    def leave_native(self, sources: Iterable[Source], reason: str) -> None:
        """More than copies was made of these; of tensors that are not known, if there are none."""
        sources = tuple(sources)
        for source in sources:
            self.native.setdefault(source, reason)
        if not sources:
            self.unsourced.setdefault(reason)

    @property
    def latest_name(self) -> str:
        """The name that went by last; empty if none did."""
        return self.names[-1] if self.names else ""

    def unused(self) -> list[str]:
        """Names that did not reach the model, in the order they were sent."""
        return [name for name in dict.fromkeys(self.names) if name not in self.consumed]

    def left(self) -> list[Source]:
        """What did not reach the model and is still held."""
        held = [one for one in (*self._sources, *self._on_meta.values()) if one.tensor is not None]
        return [one for one in held if one.name not in self.consumed]

    def forget_tensors(self) -> None:
        """Let go of the sender's memory; the names stay."""
        for one in (*self._sources, *self._on_meta.values()):
            one.tensor = None
        self._sources, self._on_meta, self._derived, self.set_aside = [], {}, {}, {}


def _copied(tensor: torch.Tensor) -> torch.Tensor:
    """Clone it past the observer, which would ask the index what it is made of, and wait for its lock."""
    with unwatched():
        return tensor.clone()
