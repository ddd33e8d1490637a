"""What depends on the GPU: whether it converts to e4m3, and what a program takes, in how many warps."""

from __future__ import annotations

import contextlib
import functools
from typing import Any

import torch

BLOCK = 128  # rows and columns of the blocks that have kernels
WIDEST = 16  # bytes of a load or store

# The first with a conversion to e4m3 (Ada); it also has the maximum of two BF16 at once.
_CONVERTS_TO_E4M3 = (8, 9)
_TILE_WARPS = 8
# With 64 registers for each of 256 threads, four programs fit on a multiprocessor. Narrow loads and
# stores need an address each, which would be spilled.
_TILE_REGISTERS, _TILE_REGISTERS_FROM = 64, 8
# Elements of a row per thread, in two stores: what a row costs is shared by so many.
_ROW_ELEMENTS = 32


@functools.cache
def has_packed_kernels(device: torch.device) -> bool:
    """Whether kernels may use the instructions of `arithmetic.packed_*`; not in the interpreter."""
    if device.type != "cuda" or torch.version.hip is not None:
        return False
    return torch.cuda.get_device_capability(device) >= _CONVERTS_TO_E4M3


def row_warps(chunk: int) -> int:
    """Warps of a program that takes `chunk` elements of a row at a time."""
    return max(1, min(16, chunk // (32 * _ROW_ELEMENTS)))


def tile_options(target_align: int) -> dict[str, Any]:
    """Launch options of a program per tile, by the bytes that divide its rows of codes."""
    options = {"num_warps": _TILE_WARPS}
    if target_align >= _TILE_REGISTERS_FROM:
        options["maxnreg"] = _TILE_REGISTERS
    return options


def on_device(device: torch.device) -> contextlib.AbstractContextManager:
    """Triton launches on the current device; a CPU tensor only gets here in the interpreter."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()
