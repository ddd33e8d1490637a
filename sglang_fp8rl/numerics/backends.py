"""Which code casts, counts and runs tables on a device: Numba on a CPU, Triton on a GPU, plain torch anywhere."""

from __future__ import annotations

import functools
import importlib
import os
from collections.abc import Sequence
from types import ModuleType
from typing import Any, Literal, Protocol

import numpy as np
import torch

from .write_table import CastTable, Kind

Backend = Literal["auto", "reference", "numba", "triton"]
_FOLDERS = {"numba": "cpu", "triton": "triton"}
_FASTEST = {"cpu": "numba", "cuda": "triton"}
# Kernels take addresses: another device's would end the process. Triton's interpreter runs on a CPU.
_DEVICES = {"numba": ("cpu",), "triton": ("cuda", "cpu" if os.getenv("TRITON_INTERPRET") else "")}


@functools.cache
def kernels(what: str, device_type: str, backend: str = "auto") -> ModuleType | None:
    """The module `what` of the device's folder, or None where plain torch does it; a backend that is asked for by name is
    not replaced by another."""
    if backend == "auto":
        backend = _FASTEST.get(device_type, "")
        if not (backend and is_there(backend)):
            return None
    if backend == "reference":
        return None
    if device_type not in _DEVICES.get(backend, ()):
        rule = "one of auto, reference, numba on a CPU, triton on CUDA; auto fits any device"
        raise ValueError(f"backend {backend!r} on {device_type!r}: {rule}")
    return importlib.import_module(f".{_FOLDERS[backend]}.{what}", __package__)


@functools.cache
def is_there(library: str) -> bool:
    """Whether an optional library can be imported: it and nothing of ours, whose fault would look like its absence."""
    try:
        importlib.import_module(library)
    except ImportError:  # Numba also raises it for a NumPy it doesn't know
        return False
    return True


class TableRunner(Protocol):
    """A table that is ready to run."""

    table: CastTable

    def start(self, addresses: Sequence[int]) -> None:
        """Write every piece from the sent tensors at these `addresses`, by position; a GPU does it behind what is
        enqueued. `wait` comes before the next start."""

    def wait(self) -> np.ndarray:
        """Return when all is written, with the flags (`CastTable.flags_of`), which the next start overwrites."""

    def run(self, addresses: Sequence[int]) -> np.ndarray:
        """Both."""


def has_kernel(device: torch.device, block: tuple[Any, Any], columns: Any) -> bool:
    """Whether a table on that device casts rows of so many columns by these blocks; of arrays, whether by all of them."""
    module: Any = kernels("table", device.type)
    if module is None or device.type != "cuda":
        return module is not None
    is_row, is_block = module.kernels_for(*block, columns)
    return bool(np.all(is_row | is_block))


def make_runner(
    table: CastTable, device: torch.device, *, pow2_scale: bool, round_to_bf16: bool
) -> TableRunner | None:
    """The kernels for destinations on `device`; None where there are none for all of its casts."""
    casts = table.pieces[table.pieces["kind"] == Kind.CAST]
    if not has_kernel(device, (casts["block_n"], casts["block_k"]), casts["cols"]):
        return None
    module: Any = kernels("table", device.type)
    rounding = {"pow2_scale": pow2_scale, "round_to_bf16": round_to_bf16}
    if device.type == "cuda":
        return module.TritonTable(table, device, **rounding)
    return module.CpuTable(table, **rounding)
