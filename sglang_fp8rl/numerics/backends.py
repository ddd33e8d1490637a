"""Which code casts, counts and runs tables on a device: Numba on a CPU, Triton on a GPU, plain torch anywhere.

All of them give the same bytes. Numba and Triton are optional, and imported on first use.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Sequence
from types import ModuleType
from typing import Any, Literal, Protocol

import numpy as np
import torch

from .grid import ceil_div
from .reference import FP8_DTYPE
from .write_table import CastTable, Kind, Piece, Widths

Backend = Literal["auto", "reference", "numba", "triton"]
_FOLDERS = {"numba": "cpu", "triton": "triton"}
_FASTEST = {"cpu": "numba", "cuda": "triton"}
_BLOCK = 128


@functools.cache
def kernels(what: str, device_type: str, backend: str = "auto") -> ModuleType | None:
    """The module `what` of the device's folder, or None where plain torch does it.

    A backend asked for by name is not replaced by another.
    """
    if backend == "auto":
        backend = _FASTEST.get(device_type, "")
        if not (backend and is_there(backend)):
            return None
    if backend == "reference":
        return None
    if backend not in _FOLDERS:
        raise ValueError(f"backend {backend!r}: one of auto, reference, {', '.join(_FOLDERS)}")
    return importlib.import_module(f".{_FOLDERS[backend]}.{what}", __package__)


@functools.cache
def is_there(library: str) -> bool:
    """Whether an optional library can be imported.

    The library and nothing of ours, so that our own fault is never taken for its absence.
    """
    try:
        importlib.import_module(library)
    except ImportError:  # Numba also raises it for a NumPy it doesn't know
        return False
    return True


class TableRunner(Protocol):
    """A table that is ready to run."""

    table: CastTable

    def run(self, addresses: Sequence[int]) -> np.ndarray:
        """Write every piece, and return when the memory has been read.

        Args:
            addresses: of the tensors that were sent, by position.

        Returns:
            uint8 flags, see `CastTable.flags_of`; overwritten by the next call.
        """


def make_runner(
    table: CastTable, device: torch.device, *, pow2_scale: bool, round_to_bf16: bool
) -> TableRunner | None:
    """The kernels for destinations on `device`; None where there are none."""
    module: Any = kernels("table", device.type)
    if module is None:
        return None
    rounding = {"pow2_scale": pow2_scale, "round_to_bf16": round_to_bf16}
    if device.type == "cuda":
        return module.TritonTable(table, device, **rounding)
    return module.CpuTable(table, **rounding)


def warm_up(
    device: torch.device,
    widths: Widths,
    *,
    pow2_scale: bool = False,
    round_to_bf16: bool = True,
) -> None:
    """Compile a device's kernels now instead of in the first updates, or load them from the disk."""
    table, sent = rehearsal(device, widths)
    runner = make_runner(table, device, pow2_scale=pow2_scale, round_to_bf16=round_to_bf16)
    if runner is not None:
        runner.run([tensor.data_ptr() for tensor in sent])


def rehearsal(device: torch.device, widths: Widths) -> tuple[CastTable, list[torch.Tensor]]:
    """A piece for every kernel that a refit in BF16, FP32 or FP8 pairs is likely to launch, and what is sent.

    Args:
        widths: of the model; what stays in high precision is taken to be BF16.
    """
    sent: list[torch.Tensor] = []
    pieces: list[Piece] = []

    def new(shape: tuple[int, int], dtype: torch.dtype) -> torch.Tensor:
        bits = torch.uint8 if dtype == FP8_DTYPE else dtype
        return torch.zeros(shape, dtype=bits, device=device).view(dtype)

    def add(shape: tuple[int, int], dtype: torch.dtype, to: torch.dtype, **what: Any) -> None:
        sent.append(new(shape, dtype))
        pieces.append(Piece((len(sent) - 1, 0), sent[-1], new(shape, to), **what))

    def add_cast(shape: tuple[int, int], dtype: torch.dtype, block: tuple[int, int]) -> None:
        add(shape, dtype, FP8_DTYPE, scales=new((1, 1), torch.float32), block_size=block)

    for dtype in (torch.bfloat16, torch.float32):
        for rows in (_BLOCK, _BLOCK // 2):
            add_cast((rows, _BLOCK), dtype, (_BLOCK, _BLOCK))
        for width in sorted(widths.per_channel):
            add_cast((1, width), dtype, (1, width))
        for width in sorted(widths.copied):
            add((1, width), dtype, torch.bfloat16)
    pairs = [(width, ceil_div(width, _BLOCK), _BLOCK) for width in sorted(widths.blockwise)]
    pairs += [(width, 1, 1) for width in sorted(widths.per_channel)]
    for width, scale_width, block_n in pairs:
        add((1, scale_width), torch.float32, torch.float32, kind=Kind.SCALES)
        add((1, width), FP8_DTYPE, FP8_DTYPE, kind=Kind.CODES, block_size=(block_n, 1))
    return CastTable.of(pieces), sent
