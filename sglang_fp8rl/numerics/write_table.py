"""Many casts and copies as one table of integers: built once, run again for every refit.

A row (*piece*) is one matrix-shaped write: where its source lies inside what was sent, where it
goes, and what is to be done with it. Sources are named by the position of the tensor they are a
part of and an offset, never by address, so a table outlives the bucket it was made from.
"""

from __future__ import annotations

from collections.abc import Collection
from enum import IntEnum
from typing import NamedTuple

import numpy as np
import torch

from ..formats.format import Pair, ceil_div
from .reference import FP8_DTYPE


class Kind(IntEnum):
    """What is done with a piece."""

    CAST = 0  # to e4m3, with scales
    COPY = 1  # to the destination's own dtype
    SCALES = 2  # scales of codes that come with them: positive numbers
    CODES = 3  # the codes of the SCALES piece before it


# Dtypes that the kernels know, and their numbers.
FP32, BF16, FP8, FP16 = range(4)
DTYPES = {torch.float32: FP32, torch.bfloat16: BF16, FP8_DTYPE: FP8, torch.float16: FP16}
WIDE = (torch.float32, torch.bfloat16, torch.float16)
# Dtypes of the source and of the destination.
_TAKEN: dict[Kind, tuple[Collection[torch.dtype], Collection[torch.dtype]]] = {
    Kind.CAST: (WIDE, (FP8_DTYPE,)),
    Kind.COPY: (WIDE, WIDE),
    Kind.SCALES: ((torch.float32,), (torch.float32,)),
    Kind.CODES: ((FP8_DTYPE,), (FP8_DTYPE,)),
}

# A source is the position of a tensor that was sent and bytes in it, destination and scales are addresses;
# strides count elements. The last two are the flags' layout: where they begin, and how many to a row.
_FIELDS = (
    "kind", "source_dtype", "source", "source_offset", "source_stride",
    "destination", "destination_dtype", "destination_stride",
    "scales", "scales_stride0", "scales_stride1",
    "rows", "cols", "block_n", "block_k",
    "flags", "flag_cols",
)  # fmt: skip
PIECE = np.dtype([(name, np.int64) for name in _FIELDS])
FIELD = {name: at for at, name in enumerate(_FIELDS)}
# Those that `Piece.row` gives.
ROW_FIELDS = len(_FIELDS) - 2

# Columns, that kernels take: of a GPU's, one program holds a row.
LONGEST_ROW = 2**18

# Flags of codes and their scales.
BAD_SCALE, NAN_CODE = 1, 2


class Piece(NamedTuple):
    """One matrix (or other tensor) to be written.

    Attributes:
        source: a view of what was sent, or what a loader made of it.
        destination: codes (e4m3) or values, of SCALES scales.
        scales: FP32 of a cast: [ceil(N / block_n), ceil(K / block_k)].
        kind: a CAST has `scales`. CODES have to follow their SCALES, one scale row for `block[0]` rows of codes: a row
            of scales that is not positive and finite keeps its old values, and so do its codes (flag BAD_SCALE).
            A row of codes with a NaN keeps its old codes (NAN_CODE); its scales are new by then.
    """

    source: torch.Tensor
    destination: torch.Tensor
    scales: torch.Tensor | None = None
    block: Pair = (1, 1)
    kind: Kind = Kind.COPY

    def fits(self) -> bool:
        """Whether the kernels take it: rows contiguous and not too long, and dtypes that they know."""
        source, destination = self.source, self.destination
        sources, destinations = _TAKEN[self.kind]
        return (
            source.dim() == destination.dim() == 2
            and source.shape == destination.shape
            and source.numel() > 0
            and source.shape[1] <= LONGEST_ROW
            and source.dtype in sources
            and destination.dtype in destinations
            and (source.stride(1) == destination.stride(1) == 1 or source.shape[1] == 1)
        )

    def row(self, place: tuple[int, int]) -> tuple[int, ...]:
        """Itself as numbers, the first `ROW_FIELDS` of `PIECE`. The `place` of its source, of which only dtype, shape and
        strides matter, is the position of a sent tensor, and an offset in it in bytes."""
        source, destination, scales = self.source, self.destination, self.scales
        stride0, stride1 = scales.stride() if scales is not None else (0, 0)
        return (
            self.kind, DTYPES[source.dtype], *place, source.stride(0),
            destination.data_ptr(), DTYPES[destination.dtype], destination.stride(0),
            scales.data_ptr() if scales is not None else 0, stride0, stride1,
            *source.shape, *self.block,
        )  # fmt: skip


class CastTable:
    """Pieces, ready to run.

    Args:
        rows: of pieces, int64 [pieces, `ROW_FIELDS`].
        owners: destinations and scales; kept alive with their addresses.
    """

    pieces: np.ndarray  # of `PIECE`
    flag_count: int  # of all pieces; flags are uint8, 1 where a block or row was not finite

    def __init__(self, rows: np.ndarray, owners: tuple[torch.Tensor, ...]) -> None:
        columns = np.zeros((len(rows), len(_FIELDS)), np.int64)
        columns[:, :ROW_FIELDS] = rows
        table = columns.view(PIECE).reshape(-1)
        kind = table["kind"]
        per_row = (kind == Kind.COPY) | (kind == Kind.SCALES)
        heights = np.where(per_row, table["rows"], ceil_div(table["rows"], table["block_n"]))
        widths = np.where(kind == Kind.CAST, ceil_div(table["cols"], table["block_k"]), 1)
        counts = np.where(kind == Kind.CODES, 0, heights * widths)
        starts = np.cumsum(counts) - counts
        # Codes have the flags of their scales, the piece before them.
        table["flags"] = np.where(kind == Kind.CODES, starts - heights, starts)
        table["flag_cols"] = widths
        self.pieces, self.flag_count, self._owners = table, int(counts.sum()), owners

    def flags_of(self, flags: np.ndarray, piece: int) -> np.ndarray:
        """The flags of one piece, [row blocks, column blocks]; [rows, 1] of a copy."""
        row = self.pieces[piece]
        start, cols = int(row["flags"]), int(row["flag_cols"])
        rows = ceil_div(int(row["rows"]), int(row["block_n"]))
        return flags[start : start + rows * cols].reshape(rows, cols)

    def bad_pieces(self, flags: np.ndarray) -> list[int]:
        """Pieces that have a flag set; codes, not their scales."""
        where = np.flatnonzero(flags)
        found = np.searchsorted(self.pieces["flags"], where, side="right") - 1
        return list(dict.fromkeys(found.tolist()))
