"""Casts and copies on a GPU, through Triton: one matrix, or a `CastTable`.

A table's aligned blocks are one launch, ragged ones, rows and copies others. Codes that come with their scales
are copied, rows of scales first.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from ...formats.format import ceil_div
from ..write_table import DTYPES, CastTable, Kind
from .arithmetic import has_packed_kernels, on_device
from .kernels import COLUMNS, table_cast_kernel, table_codes_kernel, table_copy_kernel
from .matrix import BLOCK, CHUNKS, WIDEST, cast_options, kernels_for, row_warps
from .matrix import cast_into as cast_into  # of one matrix, for `cast.py`
from .matrix import copy_into as copy_into

_SIZES = np.array([dtype.itemsize for dtype in DTYPES])  # by their numbers
_CHUNKS = np.array(CHUNKS)


class Launch(NamedTuple):
    """Programs that share a kernel and its constants."""

    kernel: Any
    owners: torch.Tensor  # int32 [programs], the piece of each
    sources: np.ndarray  # positions of the tensors it reads
    align: int  # bytes that divide offsets and strides of the sources
    constants: dict[str, int | bool]  # with the options of the launch


class TritonTable:
    """A table on the GPU of its destinations ("cpu" only works in Triton's interpreter), its programs in launches."""

    def __init__(
        self, table: CastTable, device: torch.device, *, pow2_scale: bool, round_to_bf16: bool
    ) -> None:
        self.table, self._device = table, device
        self._packed = has_packed_kernels(device)
        self._rounding = {
            "POW2": bool(pow2_scale),
            "ROUND": bool(round_to_bf16),
            "PACKED": self._packed and round_to_bf16,
        }
        rows = np.zeros((len(table.pieces), len(COLUMNS)), np.int64)
        rows[:, :-1] = table.pieces.view(np.int64).reshape(len(table.pieces), -1)
        self.launches = [
            self._launch(group, pieces, rows) for group, pieces in _groups(table.pieces)
        ]
        self._rows = on_device(rows, device)
        self._flags = torch.zeros(max(1, table.flag_count), dtype=torch.int8, device=device)
        sources = 1 + int(table.pieces["source"].max(initial=-1))
        self._sent = torch.zeros(1 + sources, dtype=torch.int64, pin_memory=device.type == "cuda")
        self._call = torch.zeros(1 + sources, dtype=torch.int64, device=device)
        self._no_flags = np.zeros(table.flag_count, np.uint8)

    def _launch(self, group: _Group, pieces: np.ndarray, rows: np.ndarray) -> Launch:
        table = self.table.pieces[pieces]
        programs = table["rows"]
        if group.is_block:
            programs = ceil_div(programs, BLOCK) * table["flag_cols"]
        rows[pieces, -1] = np.cumsum(programs) - programs
        owners = on_device(np.repeat(pieces.astype(np.int32), programs), self._device)
        kernel, constants = self._kernel(group)
        return Launch(kernel, owners, np.unique(table["source"]), group.source_align, constants)

    def _kernel(self, group: _Group) -> tuple[Any, dict[str, int | bool]]:
        """The kernel of a group, and its constants and launch options."""
        constants: dict[str, int | bool] = {"TARGET_ALIGN": group.target_align}
        kind: dict[str, int | bool] = {"KIND": group.source_dtype}
        if group.kind == Kind.CAST:
            chunk = 0 if group.is_block else group.chunk
            options = cast_options(chunk, bool(group.is_ragged), group.target_align)
            return table_cast_kernel, constants | kind | options | self._rounding
        constants |= {"CHUNK": group.chunk, "num_warps": row_warps(group.chunk)}
        if group.kind == Kind.CODES:
            return table_codes_kernel, constants
        constants |= {"TO": group.target_dtype, "PACKED": self._packed}
        constants["SCALES"] = group.kind == Kind.SCALES
        return table_copy_kernel, constants | kind

    def start(self, addresses: Sequence[int]) -> None:
        """As `TableRunner.start`."""
        where = np.asarray(addresses, np.int64)[: len(self._sent) - 1]
        self._sent.numpy()[1:] = where
        lowest = (where | WIDEST) & -(where | WIDEST)
        with torch.cuda.device_of(self._call):  # on which Triton launches
            self._call.copy_(self._sent, non_blocking=True)  # its first number says: no flags
            for launch in self.launches:
                arguments = (self._rows, launch.owners, self._call, self._flags)
                # One source at an odd address slows down the others of its launch.
                align = min(launch.align, int(lowest[launch.sources].min()))
                launch.kernel[(len(launch.owners),)](
                    *arguments, SOURCE_ALIGN=align, **launch.constants
                )

    def wait(self) -> np.ndarray:
        """As `TableRunner.wait`: then the sender may reuse its memory."""
        if not int(self._call[0]):
            return self._no_flags
        return self._flags[: self.table.flag_count].cpu().numpy().view(np.uint8)

    def run(self, addresses: Sequence[int]) -> np.ndarray:
        self.start(addresses)
        return self.wait()


class _Group(NamedTuple):
    """What pieces of one launch have in common; codes sort behind their scales."""

    kind: int
    is_block: int
    is_ragged: int
    source_align: int
    target_align: int
    source_dtype: int
    target_dtype: int
    chunk: int


def _groups(pieces: np.ndarray) -> list[tuple[_Group, np.ndarray]]:
    """Each group with the indices of its pieces, in the order of their kinds."""
    kind = pieces["kind"]
    _, is_block = kernels_for(pieces["block_n"], pieces["block_k"], pieces["cols"])
    is_block &= kind == Kind.CAST
    is_ragged = is_block & ((pieces["rows"] % BLOCK != 0) | (pieces["cols"] % BLOCK != 0))
    size, target_size = _SIZES[pieces["source_dtype"]], _SIZES[pieces["destination_dtype"]]
    source = pieces["source_offset"] | pieces["source_stride"] * size | WIDEST
    along = (pieces["destination_stride"] | pieces["cols"]) * target_size
    target = pieces["destination"] | along | WIDEST
    chunks = _CHUNKS[np.searchsorted(_CHUNKS, np.where(is_block, 0, pieces["cols"]))]
    dtypes = pieces["source_dtype"], pieces["destination_dtype"]
    columns = (kind, is_block, is_ragged, source & -source, target & -target, *dtypes, chunks)
    keys, group_of = np.unique(np.stack(columns, axis=1), axis=0, return_inverse=True)
    groups = [_Group(*key) for key in keys.tolist()]
    return [(group, np.flatnonzero(group_of.ravel() == i)) for i, group in enumerate(groups)]
