"""Operations of torch, seen one by one, in the thread that asks for it and in those that it starts."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

See = Callable[[Any, tuple, dict], Any]
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
