"""A `CastTable` of pieces that are at hand; a server lays out the numbers that it recorded."""

from __future__ import annotations

import numpy as np
import torch

from ...numerics.write_table import ROW_FIELDS, CastTable, Piece


def table_of(pieces: list[tuple[tuple[int, int], Piece]]) -> CastTable:
    """Lay out pieces that all `fits()`, each with the place of its source (`Piece.row`)."""
    owners: dict[int, torch.Tensor] = {}
    for _, piece in pieces:
        for tensor in (piece.destination, piece.scales):
            if tensor is not None:
                owners[tensor.untyped_storage()._cdata] = tensor
    rows = [piece.row(place) for place, piece in pieces]
    return CastTable(np.array(rows, np.int64).reshape(-1, ROW_FIELDS), tuple(owners.values()))
