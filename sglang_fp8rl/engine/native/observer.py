"""Everything that happens to sent tensors, and to the model's memory, while its `load_weights` runs.

Most of a model's loading ends in `narrow(...)` and `copy_` into a parameter, through its
`weight_loader`. Some of it does not: a model fills a scalar with a value that it read, writes into a
buffer, joins tensors, computes. Each of these is an operation of torch, so a dispatch mode sees it,
whoever wrote the model. What is a copy of (a view of) what was sent becomes a write like any other, to
be cast and recorded. For anything else the names that it came from are left to SGLang's loaders at
every update, with the reason.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from ...errors import RefitError
from ..arrival.sent_tensors import Source, SourceIndex
from ..interception.watch import (
    OperationKind,
    asked_by,
    each_new_thread,
    kind_of,
    tensors_in,
    watched,
)
from ..interception.writes import LoaderWrites, Write, write_into
from ..model.parameters import ModelMemory, Target

aten = torch.ops.aten


class Observer:
    """Watches one call of `load_weights`.

    Args:
        sources: the tensors that are sent.
        memory: of the model.
        store: does a write into a target that no loader was called for.
        stores: False for a probe on `meta`, which writes nothing.

    Attributes:
        native: sent tensors of which more than copies was made, and what.
        unsourced: reasons why the call as a whole is more than copies of what was sent.
        written: indices of the targets that the call wrote so far.
    """

    def __init__(
        self,
        sources: SourceIndex,
        memory: ModelMemory,
        store: Callable[[Target, Write], None],
        *,
        stores: bool,
    ) -> None:
        self._sources, self._memory, self._store, self._stores = sources, memory, store, stores
        self.native: dict[Source, str] = {}
        self.unsourced: dict[str, None] = {}
        self.written: set[int] = set()
        self._reads: list[list[torch.Tensor]] = []
        self._thread = _Thread(self._reads)
        self._is_over = False

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Operations of this thread, and of threads that are started meanwhile, are watched in here."""
        try:
            with each_new_thread(self._enter), self.watching_thread():
                yield
        finally:
            self._is_over = True
            for reads in self._reads:
                self._note_reads(reads)

    def _enter(self) -> None:
        """Watch this thread to its end."""
        self._thread.is_watched = True
        watched(self._see).__enter__()

    @contextmanager
    def watching_thread(self) -> Iterator[None]:
        """Operations of this thread are watched in here: a loader may run in any."""
        if self._thread.is_watched:
            yield
            return
        self._thread.is_watched = True
        try:
            with watched(self._see):
                yield
        finally:
            self._thread.is_watched = False

    def writes_of(
        self,
        loader: Callable[..., Any],
        stand_in: torch.Tensor,
        parameter: torch.Tensor,
        arguments: tuple,
        kwargs: dict,
    ) -> LoaderWrites:
        """What `loader(stand_in, *arguments)` would write into `parameter`."""
        thread = self._thread
        outer, reads, known = thread.loader, len(thread.unused_reads), self._known
        found = thread.loader = LoaderWrites(stand_in, parameter)
        try:
            with self.watching_thread():
                loader(stand_in, *arguments, **kwargs)
        except _UsesParameter:
            pass
        finally:
            thread.loader = outer
            self._note_reads(thread.unused_reads, reads)
        found.is_all = self._known == known and not found.reads_other
        return found

    def leave_native(self, sources: tuple[Source, ...], reason: str) -> None:
        """More than copies was made of these; of tensors that are not known, if there are none."""
        for source in sources:
            self.native.setdefault(source, reason)
        if not sources:
            self.unsourced.setdefault(reason)

    @property
    def _known(self) -> int:
        return len(self.native) + len(self.unsourced)

    # -- operations --------------------------------------------------------------------------------

    def _see(self, func: Any, args: tuple, kwargs: dict) -> Any:
        """One operation; returns its result."""
        kind = kind_of(func)
        if kind.is_view or self._is_over:
            return func(*args, **kwargs)
        loader = self._thread.loader
        if loader is not None and any(map(loader.is_parameter, tensors_in((args, kwargs)))):
            # It has not yet what the loader wrote (Gemma's norms keep `weight + 1` beside it).
            loader.other = f"{func} with the parameter itself"
            raise _UsesParameter
        if func is aten.copy_.default and self._copied(args[0], args[1]):
            return args[0]
        if func in _FILLS and self._filled(func, *args):
            return args[0]
        if func is aten._local_scalar_dense.default:
            return self._read(func, args[0])
        if func is aten._to_copy.default and self._is_to_nowhere(args[0], kwargs.get("device")):
            # `loaded.to(parameter.device)` of a loader that runs on a stand-in, or in a probe.
            kwargs = {key: value for key, value in kwargs.items() if key != "device"}
            if kwargs.get("dtype") in (None, args[0].dtype):
                return args[0]
        return self._computed(func, kind, args, kwargs)

    def _is_to_nowhere(self, tensor: torch.Tensor, device: Any) -> bool:
        if device is None:
            return False
        on_stand_in = self._thread.loader is not None and torch.device(device).type == "meta"
        return on_stand_in or tensor.device.type == "meta"

    def _copied(self, destination: torch.Tensor, source: torch.Tensor) -> bool:
        if source.shape != destination.shape:
            source = source.expand(destination.shape)
        return self._write(destination, source, 0.0)

    def _filled(self, func: Any, destination: torch.Tensor, value: Any = 0.0) -> bool:
        source = self._take_read(destination) if func is aten.fill_.Scalar else None
        return self._write(destination, source, float(value))

    def _write(self, destination: torch.Tensor, source: torch.Tensor | None, fill: float) -> bool:
        """Note a write into a stand-in, do one into the model; False if it is into neither."""
        loader = self._thread.loader
        if loader is not None and loader.has(destination):
            if destination.numel():  # the padding of a vocabulary that needs none is empty
                loader.writes.append(write_into(loader.stand_in, destination, source, fill))
            return True
        target = self._memory.target_of(destination)
        if target is None:
            return False
        if destination.numel():
            self._store(target, write_into(target.parameter, destination, source, fill))
        return True

    def _read(self, func: Any, tensor: torch.Tensor) -> Any:
        """Python asks for a value."""
        self._thread.has_read = bool(self._made_of(tensor))
        if self._thread.has_read:
            self._thread.unused_reads.append(tensor)
        elif self._thread.loader is not None:
            self._thread.loader.reads_other = True
        return _NO_VALUE if tensor.device.type == "meta" else func(tensor)

    def _take_read(self, destination: torch.Tensor) -> torch.Tensor | None:
        """What `fill_(tensor.item())` is a copy of: SGLang loads one-element parameters that way.

        In that function only: elsewhere Python may have computed what is filled in.
        """
        reads = self._thread.unused_reads
        is_copy = reads and self._thread.has_read and self._place_of(destination)
        if not is_copy or asked_by() != _DEFAULT_LOADER:
            return None
        return reads.pop().as_strided(destination.shape, [0] * destination.dim())

    def _note_reads(self, reads: list[torch.Tensor], kept: int = 0) -> None:
        """Values that were read for anything but a fill: what Python makes of them is not known."""
        for tensor in reads[kept:]:
            sources = self._sources.made_of(tensor).sources
            self.leave_native(sources, "SGLang reads its value while loading")
            self._sources.consume(sources)
        del reads[kept:]

    def _computed(self, func: Any, kind: OperationKind, args: tuple, kwargs: dict) -> Any:
        """Any other operation: what of the model does it write, and of what are its results made?"""
        used = {one: None for tensor in tensors_in((args, kwargs)) for one in self._made_of(tensor)}
        sources = tuple(used)
        if sources:
            self.leave_native(sources, f"SGLang computes with it while loading ({func})")
        written = kind.written_of(args, kwargs)
        may_write = [self._may_write(tensor, func, sources) for tensor in tensors_in(written)]
        if not all(may_write):
            return args[0]
        if not self._stores and any(
            one.device.type == "meta" for one in tensors_in((args, kwargs))
        ):
            if written:
                return args[0]
            args, kwargs = tree_map_only(torch.Tensor, _on_meta, (args, kwargs))
        result = func(*args, **kwargs)
        if not written:
            for tensor in tensors_in(result):
                self._sources.derive(tensor, sources)
        return result

    def _may_write(self, tensor: torch.Tensor, func: Any, sources: tuple[Source, ...]) -> bool:
        """Whether an operation that is no copy may write `tensor`; what follows from it is noted."""
        loader = self._thread.loader
        if loader is not None and loader.has(tensor):
            loader.other = str(func)
            return False
        place = self._memory.place_of(tensor)
        if not place:
            self._sources.derive(tensor, sources, adds=True)
            return True
        if self._memory.is_quantized(tensor):
            raise RefitError(
                ", ".join(source.name for source in sources) or place,
                f"SGLang writes {place} by {func}",
                "what is served in FP8 is written by copies, which are cast with their scales",
                "Add the module to ignored_layers.",
            )
        self.leave_native(sources, f"SGLang writes {place} by itself ({func})")
        self._sources.consume(sources)
        return self._stores

    def _made_of(self, tensor: torch.Tensor) -> tuple[Source, ...]:
        """Not known of what a loader wrote: what is made of that is made of the whole call."""
        sources = self._sources.made_of(tensor).sources
        if not sources and self._memory.indices_of(tensor) & self.written:
            self.leave_native((), f"SGLang reads {self._memory.place_of(tensor)} while loading")
        return sources

    def _place_of(self, tensor: torch.Tensor) -> str:
        loader = self._thread.loader
        is_stand_in = loader is not None and loader.has(tensor)
        return "a stand-in" if is_stand_in else self._memory.place_of(tensor)


class _UsesParameter(BaseException):
    """Ends a loader's run on a stand-in. Not an `Exception`: loaders may catch those."""


class _Thread(threading.local):
    """What one thread of a call is at.

    Attributes:
        is_watched: whether its mode is on.
        loader: what the loader that it is in has done.
        unused_reads: of which sent tensors Python read the value, without a fill so far.
        has_read: whether the last value that it read is of one.
    """

    def __init__(self, all_reads: list[list[torch.Tensor]]) -> None:
        self.is_watched = False
        self.loader: LoaderWrites | None = None
        self.unused_reads: list[torch.Tensor] = []
        self.has_read = False
        all_reads.append(self.unused_reads)


def _on_meta(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to("meta")


# What Python reads of a tensor without values, in a probe: a number that loaders can divide by.
_NO_VALUE = 1
_DEFAULT_LOADER = "sglang.srt.model_loader.weight_utils", "default_weight_loader"
_FILLS = frozenset({aten.fill_.Scalar, aten.fill_.Tensor, aten.zero_.default})
