"""CPU tensors of a request: their memory is as long as it says, and costs no socket for each sender.

torch extends a file of shared memory that is too short with zeros, which would be served. It also
connects to the manager process of every sender and keeps that socket for good. The file says how long it
is, and any manager can keep the count; so torch is given an empty handle, by which it takes its own.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.multiprocessing import reductions

from ...errors import RefitError

_FILES = Path("/dev/shm")  # where Linux keeps what `shm_open` names


@contextmanager
def checked_shared_memory() -> Iterator[None]:
    """What is unpickled in here maps shared memory only if it is all there.

    Side effects: two functions of `torch.multiprocessing.reductions` are replaced until the end.
    """
    by_name, by_descriptor = reductions.rebuild_storage_filename, reductions.rebuild_storage_fd
    reductions.rebuild_storage_filename = _checked_by_name(by_name)
    reductions.rebuild_storage_fd = _checked_by_descriptor(by_descriptor)
    try:
        yield
    finally:
        reductions.rebuild_storage_filename = by_name
        reductions.rebuild_storage_fd = by_descriptor


def _checked_by_name(original: Callable[..., Any]) -> Callable[..., Any]:
    def rebuild_storage_filename(
        cls: Any, manager: bytes, handle: bytes, size: int, dtype: torch.dtype | None = None
    ) -> Any:
        file = _FILES / os.fsdecode(handle).lstrip("/")
        if not file.exists():  # gone, or kept elsewhere: torch says so
            return original(cls, manager, handle, size, dtype)
        _check_length(file.name, file.stat().st_size, size * (dtype.itemsize if dtype else 1))
        return original(cls, b"", handle, size, dtype)

    return rebuild_storage_filename


def _checked_by_descriptor(original: Callable[..., Any]) -> Callable[..., Any]:
    def rebuild_storage_fd(cls: Any, descriptor: Any, size: int) -> Any:
        return original(cls, _Checked(descriptor, size), size)

    return rebuild_storage_fd


class _Checked:
    """A descriptor that is on its way, looked at when it has arrived."""

    def __init__(self, descriptor: Any, size: int) -> None:
        self._descriptor, self._size = descriptor, size

    def detach(self) -> int:
        arrived = self._descriptor.detach()
        try:
            _check_length(f"descriptor {arrived}", os.fstat(arrived).st_size, self._size)
        except RefitError:
            os.close(arrived)
            raise
        return arrived


def _check_length(name: str, found: int, wanted: int) -> None:
    if found < wanted:
        raise RefitError(
            f"shared memory {name}",
            f"{found} bytes",
            f"the tensors in it take {wanted}, and what is not there would be served as zeros",
            "Keep the tensors alive until the server answers; nothing of this request was stored.",
        )
