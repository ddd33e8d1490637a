"""A `CastTable` of pieces that are at hand; a server lays out the numbers that it recorded."""

from __future__ import annotations

import numpy as np
import torch

from ...numerics.write_table import ROW_FIELDS, CastTable, Piece


def table_of(pieces: list[Piece]) -> CastTable:
    """Lay out pieces that all `fits()`."""
    owners: dict[int, torch.Tensor] = {}
    for piece in pieces:
        for tensor in (piece.destination, piece.scales):
            if tensor is not None:
                owners[tensor.untyped_storage()._cdata] = tensor
    rows = np.array([piece.row() for piece in pieces], np.int64).reshape(-1, ROW_FIELDS)
    return CastTable.of_rows(rows, tuple(owners.values()))
