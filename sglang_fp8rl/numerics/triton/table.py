"""Run a `CastTable` on a GPU: all aligned blocks in one launch, ragged ones, rows and copies in others.

Codes that come with their scales are copied, rows of scales first.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from ..cast import FP8_DTYPE
from ..write_table import CastTable, Dtype, Kind, Piece, Widths
from . import table_kernels as kernels
from .cast import LONGEST_ROW_READ_ONCE, WIDEST, _on_device
from .hardware import has_packed_kernels, row_warps, tile_options

_BLOCK = 128
_SIZES = np.array([4, 2, 2, 1])  # bytes, by `Dtype`
# Rows are read in chunks of these sizes: one launch for each that a table has.
_CHUNKS = np.array([64, 512, 2048, 4096, 8192, LONGEST_ROW_READ_ONCE])


@dataclass(frozen=True)
class Launch:
    """Programs that share a kernel and its constants.

    Attributes:
        owners: int32 [programs], the piece of each.
        sources: positions of the tensors it reads.
        align: bytes that divide offsets and strides of the sources; 0 where it makes no difference.
    """

    kernel: Any
    owners: torch.Tensor
    sources: np.ndarray
    align: int
    constants: dict[str, int | bool]
    options: dict[str, Any] = field(default_factory=dict)


class TritonTable:
    """A table on a GPU, its programs grouped into launches.

    Args:
        device: of the destinations; "cpu" only works in Triton's interpreter.
        pow2_scale, round_to_bf16: as in `cast_into`; copies take no notice of them.
    """

    def __init__(
        self, table: CastTable, device: torch.device, *, pow2_scale: bool, round_to_bf16: bool
    ) -> None:
        self.table, self._device = table, device
        packed = has_packed_kernels(device)
        self._rounding = {
            "POW2": bool(pow2_scale), "ROUND": bool(round_to_bf16), "PACKED": packed and round_to_bf16,
        }  # fmt: skip
        self._copying = {"PACKED": packed}
        rows = np.zeros((len(table.pieces), len(kernels.COLUMNS)), np.int64)
        rows[:, :-1] = table.pieces.view(np.int64).reshape(len(table.pieces), -1)
        self._launches = [self._launch(key, pieces, rows) for key, pieces in _groups(table.pieces)]
        self._rows = torch.from_numpy(rows).to(device)
        self._flags = torch.zeros(max(1, table.flag_count), dtype=torch.int8, device=device)
        sources = 1 + int(table.pieces["source"].max(initial=-1))
        pinned = device.type == "cuda"
        self._sent = torch.zeros(1 + sources, dtype=torch.int64, pin_memory=pinned)
        self._call = torch.zeros(1 + sources, dtype=torch.int64, device=device)
        self._no_flags = np.zeros(table.flag_count, np.uint8)

    @property
    def launches(self) -> int:
        """Of a call whose sources are aligned."""
        return len(self._launches)

    @property
    def nbytes(self) -> int:
        """Device memory of the table, its programs and its flags."""
        held = [self._rows, self._flags, self._call]
        return sum(one.nbytes for one in [*held, *(launch.owners for launch in self._launches)])

    def _launch(self, group: _Group, pieces: np.ndarray, rows: np.ndarray) -> Launch:
        table = self.table.pieces[pieces]
        blocks = -(-table["rows"] // _BLOCK) * table["flag_cols"]
        programs = blocks if group.is_block else table["rows"]
        rows[pieces, -1] = np.cumsum(programs) - programs
        owners = np.repeat(pieces.astype(np.int32), programs)
        constants: dict[str, int | bool] = {"TARGET_ALIGN": group.target_align}
        if group.is_block:
            kernel, options = kernels.table_tile_kernel, tile_options(group.target_align)
            constants |= {
                "RAGGED": bool(group.is_ragged),
                "KIND": group.source_dtype,
                **self._rounding,
            }
        else:
            chunk = group.chunk
            constants |= {"CHUNK": chunk, "ONE_CHUNK": int(table["cols"].max()) <= chunk}
            options = {"num_warps": row_warps(chunk)}
            kernel = kernels.table_codes_kernel
            if group.kind == Kind.CAST:
                kernel = kernels.table_row_kernel
                constants |= {"KIND": group.source_dtype, **self._rounding}
            elif group.kind == Kind.COPY:
                kernel = kernels.table_copy_kernel
                to_fp32 = group.target_dtype == Dtype.FP32
                constants |= {"KIND": group.source_dtype, "TO_FP32": to_fp32, **self._copying}
            elif group.kind == Kind.SCALES:
                kernel, constants = kernels.table_scales_kernel, {"CHUNK": chunk}
        return Launch(
            kernel,
            torch.from_numpy(owners).to(self._device),
            np.unique(table["source"]),
            0 if group.kind == Kind.SCALES else group.source_align,
            constants,
            options,
        )

    def run(self, addresses: Sequence[int]) -> np.ndarray:
        """As `TableRunner.run`; waits for the device, so the sender may reuse its memory."""
        where = np.asarray(addresses, np.int64)[: len(self._sent) - 1]
        self._sent.numpy()[1:] = where
        lowest = (where | WIDEST) & -(where | WIDEST)
        with _on_device(self._device):
            self._call.copy_(self._sent, non_blocking=True)  # its first number says: no flags
            for launch in self._launches:
                arguments = (self._rows, launch.owners, self._call, self._flags)
                grid = (len(launch.owners),)
                for constants in _variants(launch, lowest):
                    launch.kernel[grid](*arguments, **constants, **launch.options)
            if not int(self._call[0]):
                return self._no_flags
        return self._flags.cpu().numpy().view(np.uint8)[: self.table.flag_count]


def _variants(launch: Launch, lowest: np.ndarray) -> Iterator[dict[str, int | bool]]:
    """Constants of the launches that a call needs: one, but for sources at odd addresses."""
    if not launch.align:
        yield launch.constants
        return
    for align in np.unique(np.minimum(lowest[launch.sources], launch.align)).tolist():
        yield {"ALIGN": launch.align, "SOURCE_ALIGN": align, **launch.constants}


@dataclass(frozen=True, order=True)
class _Group:
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
    kind, is_scales = pieces["kind"], pieces["kind"] == Kind.SCALES
    is_block = (kind == Kind.CAST) & (pieces["block_n"] > 1)
    is_ragged = is_block & ((pieces["rows"] % _BLOCK != 0) | (pieces["cols"] % _BLOCK != 0))
    size = _SIZES[pieces["source_dtype"]]
    target_size = np.where(kind == Kind.COPY, _SIZES[pieces["destination_dtype"]], 1)
    source = pieces["source_offset"] | pieces["source_stride"] * size | WIDEST
    target = (
        pieces["destination"]
        | pieces["destination_stride"] * target_size
        | pieces["cols"] * target_size
        | WIDEST
    )
    chunks = _CHUNKS[np.minimum(np.searchsorted(_CHUNKS, pieces["cols"]), len(_CHUNKS) - 1)]
    columns = (
        kind,
        is_block,
        is_ragged,
        np.where(is_scales, 0, source & -source),
        np.where(is_scales, 0, target & -target),
        np.where(is_scales, 0, pieces["source_dtype"]),
        np.where(kind == Kind.COPY, pieces["destination_dtype"], 0),
        np.where(is_block, 0, chunks),
    )
    keys = np.stack(columns, 1).astype(np.int64)
    found, inverse = np.unique(keys, axis=0, return_inverse=True)
    inverse = inverse.reshape(-1)
    return [(_Group(*key.tolist()), np.flatnonzero(inverse == at)) for at, key in enumerate(found)]


def rehearsal(
    device: torch.device, widths: Widths, **rounding: bool
) -> tuple[TritonTable, list[torch.Tensor]]:
    """A table with a piece for every kernel that a refit in BF16, FP32 or FP8 pairs is likely to
    launch, and its sources: to be run once, so that no update waits for the compiler.

    Args:
        widths: of the model; what stays in high precision is taken to be BF16.
        rounding: as of `TritonTable`.
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
        scales = torch.zeros(1, 1, device=device)
        add(shape, dtype, FP8_DTYPE, scales=scales, block_size=block)

    for dtype in (torch.bfloat16, torch.float32):
        for rows in (_BLOCK, _BLOCK // 2):
            add_cast((rows, _BLOCK), dtype, (_BLOCK, _BLOCK))
        for width in sorted(widths.per_channel):
            add_cast((1, width), dtype, (1, width))
        for width in sorted(widths.copied):
            add((1, width), dtype, torch.bfloat16)
    pairs = [(width, -(-width // _BLOCK), _BLOCK) for width in sorted(widths.blockwise)]
    pairs += [(width, 1, 1) for width in sorted(widths.per_channel)]
    for width, scale_width, block_n in pairs:
        add((1, scale_width), torch.float32, torch.float32, kind=Kind.SCALES)
        add((1, width), FP8_DTYPE, FP8_DTYPE, kind=Kind.CODES, block_size=(block_n, 1))
    return TritonTable(CastTable.of(pieces), device, **rounding), sent
