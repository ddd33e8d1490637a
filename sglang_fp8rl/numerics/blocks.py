"""Single blocks of a quantized matrix: their digests, and moving some of them. Torch only.

A digest is 64 bits over the codes of a block and its scale: each code's byte times an odd constant of
its place, summed modulo 2**64. Two blocks that differ have the same digest with a chance of about
2**-57. It guards against weights that are not what the other side thinks, not against malice.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from .checks import block_scale_shape

_CHUNK = 1 << 22  # codes widened to int64 at a time
_SCALE_FACTOR = -0x61C8864680B583EB


def block_digests(
    codes: torch.Tensor, scale: torch.Tensor, block_size: tuple[int, int]
) -> torch.Tensor:
    """int64 `[row blocks, column blocks]`; the last ones may be smaller.

    Args:
        codes: [N, K] of one byte each; rows contiguous, any row stride.
        scale: FP32 [row blocks, column blocks], any strides.
    """
    block_n, block_k = block_size
    rows, columns = codes.shape
    grid = block_scale_shape((rows, columns), block_size)
    digests = torch.empty(grid, dtype=torch.int64, device=codes.device)
    factors = _factors(block_size, codes.device).repeat(1, grid[1])[:, :columns]
    step = max(1, _CHUNK // max(1, block_n * columns))
    as_bytes = codes.view(torch.uint8)
    for first in range(0, grid[0], step):
        part = as_bytes[first * block_n : (first + step) * block_n].to(torch.int64)
        short = -part.shape[0] % block_n
        part = torch.nn.functional.pad(part, (0, 0, 0, short)).view(-1, block_n, columns)
        part = (part * factors).sum(1)  # [row blocks, K]
        part = torch.nn.functional.pad(part, (0, grid[1] * block_k - columns))
        digests[first : first + step] = part.view(-1, grid[1], block_k).sum(2)
    return digests + _of_scale(scale)


def digests_of_blocks(blocks: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """int64 [n] of single blocks: uint8 [n, block_n, block_k], zero where a block is shorter."""
    factors = _factors((blocks.shape[1], blocks.shape[2]), blocks.device)
    step = max(1, _CHUNK // max(1, factors.numel()))
    parts = [(part.to(torch.int64) * factors).sum((1, 2)) for part in blocks.split(step)]
    return torch.cat([*parts, blocks.new_empty(0, dtype=torch.int64)]) + _of_scale(scale)


def read_blocks(
    codes: torch.Tensor, row: torch.Tensor, column: torch.Tensor, block_size: tuple[int, int]
) -> torch.Tensor:
    """Blocks by their row and column in the grid (int64 [n]): uint8 [n, block_n, block_k], zero
    where a block is shorter."""
    blocks = torch.zeros((len(row), *block_size), dtype=torch.uint8, device=codes.device)
    for view, which, at in _zones(codes, row, column, block_size):
        height, width = view.shape[2:]
        blocks[which, :height, :width] = view[at]
    return blocks


def write_blocks(
    codes: torch.Tensor,
    row: torch.Tensor,
    column: torch.Tensor,
    blocks: torch.Tensor,
    block_size: tuple[int, int],
) -> None:
    """The reverse of `read_blocks`, in place."""
    for view, which, at in _zones(codes, row, column, block_size):
        height, width = view.shape[2:]
        view[at] = blocks[which, :height, :width]


def _zones(
    codes: torch.Tensor, row: torch.Tensor, column: torch.Tensor, block_size: tuple[int, int]
) -> Iterator[tuple[torch.Tensor, torch.Tensor, tuple[torch.Tensor, torch.Tensor]]]:
    """Parts of the matrix with blocks of one size: whole ones, a short last row or column, and the
    corner. Yields a view [row blocks, column blocks, height, width], which of the asked-for
    blocks lie in it, and where."""
    as_bytes = codes.view(torch.uint8)
    spans = [
        [(0, size // step, step), (size // step, 1, size % step)]
        for size, step in zip(codes.shape, block_size, strict=True)
    ]
    for first_row, count_rows, height in spans[0]:
        for first_column, count_columns, width in spans[1]:
            if not (count_rows and count_columns and height and width):
                continue
            which = (row >= first_row) & (row < first_row + count_rows)
            which &= (column >= first_column) & (column < first_column + count_columns)
            (which,) = torch.nonzero(which, as_tuple=True)
            corner = as_bytes[first_row * block_size[0] :, first_column * block_size[1] :]
            view = corner.as_strided(
                (count_rows, count_columns, height, width),
                (height * as_bytes.stride(0), width, as_bytes.stride(0), 1),
            )
            yield view, which, (row[which] - first_row, column[which] - first_column)


def _factors(block_size: tuple[int, int], device: torch.device) -> torch.Tensor:
    """An odd 64-bit constant for each place of a block (splitmix64 of its number)."""
    number = torch.arange(block_size[0] * block_size[1], dtype=torch.int64, device=device)
    mixed = (number + 1) * _SCALE_FACTOR
    for shift, factor in ((30, -0x40A7B892E31B1A47), (27, -0x6B2FB644ECCEEE15)):
        mixed = (mixed ^ _shift_right(mixed, shift)) * factor
    return ((mixed ^ _shift_right(mixed, 31)) | 1).view(block_size)


def _shift_right(value: torch.Tensor, bits: int) -> torch.Tensor:
    """Without the sign."""
    return (value >> bits) & ((1 << (64 - bits)) - 1)


def _of_scale(scale: torch.Tensor) -> torch.Tensor:
    return scale.contiguous().view(torch.int32).to(torch.int64) * _SCALE_FACTOR
