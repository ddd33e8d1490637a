"""Operations of torch, seen one by one, in the thread that asks for it and in those that it starts."""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode

See = Callable[[Any, tuple, dict], Any]
# Whose functions lie between an operation and who sees it.
_BETWEEN = ("torch.", __name__.partition(".")[0] + ".")
_MODES = torch._C.DispatchKeySet(torch._C.DispatchKey.Python)


class watched(TorchDispatchMode):
    """In this context `see(operation, args, kwargs)` is called in place of every operation.

    Operations within `see` are not seen again.
    """

    def __init__(self, see: See) -> None:
        super().__init__()
        self._see = see

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        return self._see(func, args, kwargs or {})


@contextmanager
def each_new_thread(enter: Callable[[], object]) -> Iterator[None]:
    """In here, every thread that is started calls `enter` before anything else.

    A dispatch mode is a thread's own, and so are the threads of pools that models load with. Python
    offers new threads a profile function; this one does its work at the first event and goes.
    """

    def at_first_event(*_: Any) -> None:
        sys.setprofile(before)
        enter()

    before = threading.getprofile()
    threading.setprofile(at_first_event)
    try:
        yield
    finally:
        threading.setprofile(before)


def unwatched() -> AbstractContextManager[None]:
    """In this context operations are ours, and cost what they always do."""
    return torch._C._ExcludeDispatchKeyGuard(_MODES)


def asked_by() -> tuple[str, str]:
    """Module and name of the function that asked for the operation that is being seen."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_globals["__name__"].startswith(_BETWEEN):
        frame = frame.f_back
    return frame.f_globals["__name__"], frame.f_code.co_name


class OperationKind(NamedTuple):
    """What an operation does, as its schema says.

    Attributes:
        is_view: whether its results are views of its arguments, and nothing is written.
        written: the arguments that it writes, by position and name.
    """

    is_view: bool
    written: tuple[tuple[int, str], ...]

    def written_of(self, args: tuple, kwargs: dict) -> list[Any]:
        """Those that it writes, of these; `out` is given by name."""
        found = [args[at] if at < len(args) else kwargs.get(name) for at, name in self.written]
        return [one for one in found if one is not None]


@functools.cache
def kind_of(func: Any) -> OperationKind:
    schema = func._schema
    written = tuple(
        (at, one.name)
        for at, one in enumerate(schema.arguments)
        if one.alias_info is not None and one.alias_info.is_write
    )
    is_view = not written and any(one.alias_info is not None for one in schema.returns)
    return OperationKind(is_view, written)


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Those with memory of their own, in arguments or results of an operation."""
    if isinstance(value, torch.Tensor):
        if value.layout is torch.strided:
            yield value
    elif isinstance(value, dict):
        for one in value.values():
            yield from tensors_in(one)
    elif isinstance(value, (list, tuple)):
        for one in value:
            yield from tensors_in(one)
