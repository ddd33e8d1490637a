"""Writes, matrix by matrix: as they are stored now, or as pieces of a table that stores them again."""

from __future__ import annotations

from typing import Any

import torch

from ...config import Options
from ...errors import RefitError
from ...formats.format import ceil_div
from ...numerics.cast import FP8_DTYPE, as_matrix, cast_into, copy_finite_into
from ...numerics.write_table import LONGEST_ROW, Kind, Piece
from ..interception import Write
from ..model.parameters import Target, made_anew_error, matrices


def store_piece(piece: Piece, name: str, options: Options) -> torch.Tensor | None:
    """Write a piece of the sent tensor `name`.

    Returns:
        bool per block, or row: what is not finite and kept its old bytes; None of integers and of codes.
    """
    source, destination = piece.source.to(piece.destination.device), piece.destination
    if piece.scales is not None:
        rounding: Any = {
            "pow2_scale": options.use_weight_pow2_scale,
            "round_to_bf16": options.round_to_bf16,
        }
        return cast_into(source, destination, piece.scales, piece.block, name=name, **rounding)
    is_of_numbers = source.is_floating_point() and destination.is_floating_point()
    if piece.kind is Kind.COPY and is_of_numbers:
        return copy_finite_into(source, destination)
    if piece.kind is Kind.CODES:
        source, destination = source.view(torch.uint8), destination.view(torch.uint8)
    destination.copy_(source)
    return None


def row_of(piece: Piece, place: tuple[int, int]) -> tuple[int, ...] | None:
    """A piece as a row of a table, as `Piece.row`; None where the kernels don't know how to write it."""
    rows, out = as_matrix(piece.source), as_matrix(piece.destination)
    if rows is None or out is None or rows.device != out.device:
        return None
    are_flat = piece.source.is_contiguous() and piece.destination.is_contiguous()
    if piece.kind is Kind.COPY and are_flat:
        rows, out = _in_short_rows(rows), _in_short_rows(out)
    piece = piece._replace(source=rows, destination=out)
    return piece.row(place) if piece.fits() else None


def matrix_writes(target: Target, name: str, write: Write) -> list[Piece]:
    """What a write of the sent tensor `name` consists of: in FP8 a cast of each matrix (a 3-D source holds experts).

    Raises:
        RefitError: it does not consist of whole blocks (or rows) of a matrix.
    """
    source = write.values(target.parameter)
    destination, held = write.destination(target.parameter), target.format
    if held is None:
        return [Piece(source, destination)]
    if destination.dtype != FP8_DTYPE:
        raise made_anew_error(target.name)
    region = write.region
    if region is None or write.shape[-2:] != region.shape[-2:]:
        raise RefitError(
            name,
            f"a write of shape {write.shape}, strides {write.stride} into {target.name}",
            "a quantized write covers whole rows and columns of one matrix",
            "Send the tensor as the checkpoint has it.",
        )
    block = held.grid(write.shape).block
    each = matrices(source), matrices(destination), target.scales_of(name, region)
    return [Piece(*one, block, Kind.CAST) for one in zip(*each, strict=True)]


def _in_short_rows(matrix: torch.Tensor) -> torch.Tensor:
    """A contiguous matrix, its rows cut in equal parts that kernels take (Mllama's embeddings have longer ones)."""
    columns = matrix.shape[1]
    if columns <= LONGEST_ROW:
        return matrix
    least = ceil_div(columns, LONGEST_ROW)
    parts = next(at for at in range(least, columns + 1) if columns % at == 0)
    return matrix.reshape(-1, columns // parts)
