"""Writes, matrix by matrix: as they are stored now, or as pieces of a table that stores them again."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from ...config import Options
from ...errors import RefitError
from ...formats.format import Pair, ceil_div
from ...numerics.cast import FP8_DTYPE, as_matrix, cast_into, copy_finite_into
from ...numerics.write_table import LONGEST_ROW, Kind, Piece
from ..interception import Write
from ..model.parameters import Target, made_anew_error, matrices


class MatrixWrite(NamedTuple):
    """One matrix (or other tensor) and where it goes; fields as of `numerics.write_table.Piece`.

    Attributes:
        source: a view of what was sent, or what a loader made of it.
        destination: codes or values, a view of the parameter; of the scales for `SCALES`.
        scales: FP32, of a cast.
        block: rows and columns that share one of the scales.
    """

    source: torch.Tensor
    destination: torch.Tensor
    scales: torch.Tensor | None = None
    block: Pair = (1, 1)
    kind: Kind | None = None

    def store(self, target: Target, name: str, options: Options) -> torch.Tensor | None:
        """Do it.

        Returns:
            bool per block, or row: what is not finite and kept its old bytes; None of integers and of codes.
        """
        source, destination = self.source.to(self.destination.device), self.destination
        if self.scales is not None:
            rounding: Any = {
                "pow2_scale": options.use_weight_pow2_scale,
                "round_to_bf16": options.round_to_bf16,
            }
            return cast_into(source, destination, self.scales, self.block, name=name, **rounding)
        is_of_numbers = source.is_floating_point() and destination.is_floating_point()
        if self.kind is None and is_of_numbers:
            return copy_finite_into(source, destination)
        if self.kind is Kind.CODES:
            source, destination = source.view(torch.uint8), destination.view(torch.uint8)
        destination.copy_(source)
        return None

    def piece(self, source: tuple[int, int]) -> Piece | None:
        """The same for a table; None where the kernels don't know how to.

        Args:
            source: where it lies in what was sent, as of `Piece`.
        """
        rows, out = as_matrix(self.source), as_matrix(self.destination)
        if rows is None or out is None or rows.device != out.device:
            return None
        is_copy = self.kind is None and self.scales is None
        if is_copy and self.source.is_contiguous() and self.destination.is_contiguous():
            rows, out = _in_short_rows(rows), _in_short_rows(out)
        piece = Piece(source, rows, out, self.scales, self.block, self.kind)
        return piece if piece.fits() else None


def matrix_writes(target: Target, name: str, write: Write) -> list[MatrixWrite]:
    """What a write of the sent tensor `name` consists of: in FP8 a cast of each matrix (a 3-D source holds experts).

    Raises:
        RefitError: it does not consist of whole blocks (or rows) of a matrix.
    """
    source, destination = write.values(target.parameter), write.destination(target.parameter)
    held = target.format
    if held is None:
        return [MatrixWrite(source, destination)]
    if destination.dtype != FP8_DTYPE:
        raise made_anew_error(target.name)
    region = write.region
    if region is None or source.shape[-2:] != region.shape[-2:]:
        raise RefitError(
            name,
            f"a write of shape {write.shape}, strides {write.stride} into {target.name}",
            "a quantized write covers whole rows and columns of one matrix",
            "Send the tensor as the checkpoint has it.",
        )
    parts = matrices(source), matrices(destination), target.scales_of(name, region)
    return [
        MatrixWrite(values, codes, scales, held.grid(values.shape).block)
        for values, codes, scales in zip(*parts, strict=True)
    ]


def _in_short_rows(matrix: torch.Tensor) -> torch.Tensor:
    """A contiguous matrix, its rows cut in equal parts that kernels take (Mllama's embeddings have longer ones)."""
    columns = matrix.shape[1]
    if columns <= LONGEST_ROW:
        return matrix
    least = ceil_div(columns, LONGEST_ROW)
    parts = next(at for at in range(least, columns + 1) if columns % at == 0)
    return matrix.reshape(-1, columns // parts)
