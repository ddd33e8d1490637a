"""Everything that happens to sent tensors, and to the model's memory, while its `load_weights` runs.

Most of a model's loading ends in `narrow(...)` and `copy_` into a parameter, through its
`weight_loader`. Some of it does not: a model fills a scalar with a value that it read, writes into a
buffer, joins tensors, computes. Each of these is an operation of torch, so a dispatch mode sees it,
whoever wrote the model. What is a copy of (a view of) what was sent becomes a write like any other, to
be cast and recorded. Anything else leaves the bucket to SGLang's loaders at every update, with the reason.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from operator import methodcaller
from typing import Any, NoReturn

import torch
from torch.utils._pytree import tree_map_only

from ...errors import RefitError
from ..arrival.sent_tensors import Source, SourceIndex
from ..interception import (
    OperationKind,
    Write,
    each_new_thread,
    kind_of,
    storage_of,
    tensors_in,
    watched,
    write_into,
)
from ..model.parameters import ModelMemory, Target
from .checks import why_not_finite

aten = torch.ops.aten


class LoaderWrites:
    """What one loader did with a stand-in.

    Attributes:
        writes: its copies and fills; none where this rank holds nothing of the tensor (an expert of another).
        other: an operation that is neither, at which it was stopped; empty if there was none.
        is_more: whether anything happened besides, in it or in what it called.
    """

    def __init__(self, stand_in: torch.Tensor, parameter: torch.Tensor) -> None:
        self.stand_in, self._parameter = stand_in, storage_of(parameter)
        self._storage = storage_of(stand_in)
        self.writes: list[Write] = []
        self.other, self.is_more = "", False

    def has(self, tensor: torch.Tensor) -> bool:
        return storage_of(tensor) == self._storage

    def is_parameter(self, tensor: torch.Tensor) -> bool:
        """Whether it is (a part of) what the stand-in stands for."""
        return storage_of(tensor) == self._parameter

    def stop(self, operation: str) -> NoReturn:
        """End the loader's run; why is noted before the loader can catch it."""
        self.other, self.is_more = operation, True
        raise _MoreThanCopies


class Observer:
    """Watches one call of `load_weights`.

    Args:
        sources: the tensors that are sent.
        memory: of the model; asked for where anything is done but copies by loaders.
        store: does a write into a target that no loader was called for.
        settle: does the writes that wait, where it is told so, or they go to the memory of this tensor.
        raised: as `Call.raised`.
        stores: False for a probe on `meta`, which writes nothing.
    """

    def __init__(
        self,
        sources: SourceIndex,
        memory: Callable[[], ModelMemory],
        store: Callable[[Target, Write], None],
        settle: Callable[[torch.Tensor | None], None],
        raised: dict[tuple, tuple[str, str]],
        *,
        stores: bool,
    ) -> None:
        self._sources, self._memory, self._store, self._stores = sources, memory, store, stores
        self._settle, self._raised = settle, raised
        self._thread = _Thread()
        self._is_over = False

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Operations of this thread, and of threads that are started meanwhile, are watched in here."""
        try:
            with each_new_thread(self._enter), self.watching_thread():
                yield
        finally:
            self._is_over = True

    def _enter(self) -> None:
        """This thread is watched to its end."""
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
        self, run: Callable[[torch.Tensor], None], target: Target, dtype: torch.dtype
    ) -> LoaderWrites:
        """What a loader writes of a tensor of that dtype, which `run` gives the target's stand-in."""
        outer = self._thread.loader
        stand_in = target.stand_in(dtype)
        found = self._thread.loader = LoaderWrites(stand_in, target.parameter)
        try:
            with self.watching_thread():
                run(stand_in)
        except _MoreThanCopies:
            pass  # `other` says which
        finally:
            self._thread.loader = outer
        return found

    def note_more(self) -> None:
        """What happens now is more than the copies of the loader that this thread is in, if any."""
        if self._thread.loader is not None:
            self._thread.loader.is_more = True

    # -- operations --------------------------------------------------------------------------------

    def _see(self, func: Any, args: tuple, kwargs: dict) -> Any:
        """One operation; returns its result."""
        kind = kind_of(func)
        if kind.is_view or self._is_over:
            return func(*args, **kwargs)
        loader = self._thread.loader
        if loader is not None and (
            any(map(loader.is_parameter, tensors_in((args, kwargs))))
            or any(map(loader.has, tensors_in((_read_by(func, args), kwargs))))
        ):
            # Neither it nor the stand-in has what the loader wrote: Gemma's norms keep `weight + 1` beside
            # them, and Mamba's `A` is made of the `A_log` that was copied into it.
            loader.stop(f"{func} with the parameter itself")
        if func is aten.copy_.default and self._write(args[0], args[1].expand(args[0].shape)):
            return args[0]
        if func in _FILLS and self._filled(*args):
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

    def _filled(self, destination: torch.Tensor, value: Any = 0.0) -> bool:
        if isinstance(value, torch.Tensor) and self._made_of(value):
            return self._write(destination, value.expand(destination.shape))
        return self._write(destination, None, float(value))

    def _write(
        self, destination: torch.Tensor, source: torch.Tensor | None, fill: float = 0.0
    ) -> bool:
        """Note a write into a stand-in, do one into the model; False if it is into neither."""
        loader = self._thread.loader
        if loader is not None and loader.has(destination):
            if destination.dtype != loader.stand_in.dtype:
                loader.stop("a copy of bits, into a view of another dtype")
            if destination.numel():  # the padding of a vocabulary that needs none is empty
                loader.writes.append(write_into(loader.stand_in, destination, source, fill))
            return True
        target = self._memory().target_of(destination)
        if target is None:
            return False
        self.note_more()
        if destination.numel():
            self._store(target, write_into(target.parameter, destination, source, fill))
        return True

    def _read(self, func: Any, tensor: torch.Tensor) -> Any:
        """Python asks for a value. What it makes of that is not known."""
        self.note_more()
        sources = self._made_of(tensor)
        what = "its value" if sources else "a value that was not sent"
        self._sources.leave_native(sources, f"SGLang reads {what} while loading")
        self._sources.consume(sources)
        return _NO_VALUE if tensor.device.type == "meta" else func(tensor)

    def _computed(self, func: Any, kind: OperationKind, args: tuple, kwargs: dict) -> Any:
        """Any other operation: what of the model does it write, and of what are its results made?"""
        self.note_more()
        self._memory()  # as it is now: what SGLang makes from here on is no part of it
        read = tensors_in((_read_by(func, args), kwargs))
        used = {one: None for tensor in read for one in self._made_of(tensor)}
        sources = tuple(used)
        if sources:
            self._sources.leave_native(sources, f"SGLang computes with it while loading ({func})")
        written = list(tensors_in(kind.written_of(args, kwargs)))
        may_write = [self._may_write(tensor, func, sources) for tensor in written]
        if not all(may_write):
            self._sources.consume(sources)
            return args[0]
        if not self._stores and any(
            one.device.type == "meta" for one in tensors_in((args, kwargs))
        ):
            if written:
                return args[0]
            to_meta = methodcaller("to", "meta")
            args, kwargs = tree_map_only(torch.Tensor, to_meta, (args, kwargs))
        if written:
            with self._noted(func, written, sources):
                return func(*args, **kwargs)
        result = func(*args, **kwargs)
        for tensor in tensors_in(result):
            self._sources.derive(tensor, sources)
        return result

    @contextmanager
    def _noted(
        self, func: Any, written: list[torch.Tensor], sources: tuple[Source, ...]
    ) -> Iterator[None]:
        """In here `func` writes; where it fails, or makes what is not finite of `sources`, the model's place is named.

        Models catch what their loading raises, and it has no bytes to go back to.
        """
        places = [(place, one) for one in written if (place := self._place_of(one))]
        try:
            yield
        except Exception as error:
            for place, _ in places:
                text = f"{place}: SGLang failed to write it while loading ({func}): {error}"
                self._raised[(place,)] = place, text
            raise
        for place, one in places:
            if why := why_not_finite(place, one, sources):
                self._raised[(place,)] = place, why
            self._sources.consume(sources)

    def _may_write(self, tensor: torch.Tensor, func: Any, sources: tuple[Source, ...]) -> bool:
        """Whether an operation that is no copy may write `tensor`; what follows from it is noted."""
        place = self._place_of(tensor)
        if not place:
            made = self._sources.made_of(tensor)
            if made.is_view:
                # gpt-oss zeroes a sent bias: a copy of it is no copy of what comes next time.
                self._settle(None)
                self._sources.leave_native(
                    made.sources, f"SGLang writes into it while loading ({func})"
                )
            self._sources.derive(tensor, sources, adds=True)
            return True
        if self._memory().is_quantized(tensor):
            error = RefitError(
                ", ".join(source.name for source in sources) or place,
                f"SGLang writes {place} by {func}",
                "what is served in FP8 is written by copies, which are cast with their scales",
                "Add the module to ignored_layers.",
            )
            self._raised[(place,)] = error.subject, str(error)
            raise error
        self._sources.leave_native(sources, f"SGLang writes {place} by itself ({func})")
        return self._stores

    def _place_of(self, tensor: torch.Tensor) -> str:
        """As `ModelMemory.place_of`, of a tensor that is read or written now."""
        place = self._memory().place_of(tensor)
        self._settle(None if place else tensor)  # a parameter may have moved in this call
        return place

    def _made_of(self, tensor: torch.Tensor) -> tuple[Source, ...]:
        """Of the model's own memory that is not known: what is made of that is made of the whole call."""
        place, sources = self._place_of(tensor), self._sources.made_of(tensor).sources
        if place and not sources:
            self._sources.leave_native((), f"SGLang reads {place} while loading")
        return sources


def _read_by(func: Any, args: tuple) -> tuple:
    """Those arguments whose values an operation asks for; what is copied into or filled is only written."""
    return args[1:] if func is aten.copy_.default or func in _FILLS else args


class _MoreThanCopies(BaseException):
    """Ends a loader's run on a stand-in. Not an `Exception`: loaders may catch those."""


class _Thread(threading.local):
    """What one thread of a call is at.

    Attributes:
        is_watched: whether its mode is on.
        loader: what the loader that it is in has done.
    """

    def __init__(self) -> None:
        self.is_watched = False
        self.loader: LoaderWrites | None = None


# What Python reads of a tensor without values, in a probe: a number that loaders can divide by.
_NO_VALUE = 1
_FILLS = frozenset({aten.fill_.Scalar, aten.fill_.Tensor, aten.zero_.default})
