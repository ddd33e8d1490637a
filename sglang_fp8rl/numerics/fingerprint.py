"""A 64-bit number of a tensor's bytes that adds up over any boxes the tensor is cut into.

A tensor is read as a matrix of bytes, its last dimension along the rows, and each two bytes of a row as
one little-endian 16-bit word, so that an FP8 row of 4096 has 2048 words and a BF16 row 4096:

    number = sum over rows r, words j of  R[r] * C[j] * word[r, j]   (mod 2^64)

`R` and `C` are odd 64-bit keys, drawn by SplitMix64 (Steele, Lea, Flood 2014) from the row and word's
position in the *full* tensor; the rows' also from a seed. The number is linear in the bytes, so that of a
tensor is the sum of those of its shards, whatever boxes they are, down to single bytes; and what was
computed twice (a replica) is the same twice. `docs/reliability.md` has the odds of a collision.
"""

from __future__ import annotations

import functools
import hashlib
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from ..errors import QuantizationError
from ..formats.format import BlockGrid
from .backends import kernels

MASK = (1 << 64) - 1
STEP, MIX1, MIX2 = map(np.uint64, (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))
COLUMN_SEED = 0x6670386C72306B31
# This much is widened to int64 at a time.
_CHUNK_ELEMENTS = 2 * 1024 * 1024


def seed_of(name: str, part: str = "") -> int:
    """The seed of a tensor's rows: 64 bits of BLAKE2b over its name and which part of it this is."""
    text = f"{name}\0{part}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")


def keys(seed: int, first: int, count: int) -> np.ndarray:
    """uint64 `[count]`, odd: SplitMix64's outputs number `first`, `first + 1`, … from a seed."""
    with np.errstate(over="ignore"):
        x = np.arange(first + 1, first + count + 1, dtype=np.uint64) * STEP + np.uint64(seed)
        x = (x ^ (x >> np.uint64(30))) * MIX1
        x = (x ^ (x >> np.uint64(27))) * MIX2
        return (x ^ (x >> np.uint64(31))) | np.uint64(1)


class Box(NamedTuple):
    """A part of a tensor, or all of it. A tensor of fewer than two dimensions is a matrix of one row."""

    tensor: torch.Tensor  # of 1, 2, 4 or 8 bytes an element, with any strides, read where it is
    full_shape: tuple[int, ...]
    start: tuple[int, ...]  # where it lies in the full tensor
    seed: int  # of the full tensor (`seed_of`)


class Matrix(NamedTuple):
    """A box, or a part of one, whose rows follow each other in the full tensor, from `row` and `first_byte` on."""

    rows: torch.Tensor
    row: int
    first_byte: int
    seed: int

    @property
    def lies_in_rows(self) -> bool:
        """Whether every row is contiguous, none overlaps the next, and no sign is left to be changed (lazily)."""
        rows = self.rows
        return rows.stride(1) == 1 and rows.stride(0) >= rows.shape[1] and not rows.is_neg()

    def in_rows(self) -> Matrix:
        """Itself, or what is copied there now."""
        if self.lies_in_rows:
            return self
        # Not `contiguous`, which leaves a side of one element the step that it had.
        return self._replace(rows=self.rows.clone(memory_format=torch.contiguous_format))


class NumberTable:
    """Tensors laid out once, the boxes `of` each on any devices, whose numbers are asked for again and again.

    It keeps their memory alive, and each call reads the bytes that lie there then. On a GPU with Triton it costs a
    few launches and no Python for a tensor, but for those that do not lie in rows.
    """

    def __init__(self, of: Sequence[Sequence[Box]]) -> None:
        self._count = len(of)
        parts = defaultdict[torch.device, list[tuple[int, Matrix]]](list)
        for number, boxes in enumerate(of):
            for box in boxes:
                if box.tensor.numel():
                    parts[box.tensor.device] += [(number, one) for one in _matrices(box)]
        self._started = [_counter(some, len(of)) for some in parts.values()]

    def start(self) -> list[torch.Tensor]:
        """Of each device int64 `[tensors]`, the sums (mod 2^64) of the boxes there. With Triton on a GPU nothing
        waits."""
        return [start() for start in self._started] or [torch.zeros(self._count, dtype=torch.int64)]

    def numbers(self) -> list[int]:
        """Of each tensor the sum over all devices, 0 to 2^64 - 1. Waits for each GPU once."""
        found = [one.cpu().numpy().view(np.uint64) for one in self.start()]
        return np.add.reduce(found).tolist()  # of uint64: modulo 2^64


def _counter(parts: list[tuple[int, Matrix]], count: int) -> Callable[[], torch.Tensor]:
    """What gives `NumberTable.start` its tensor, of one device's matrices, each with its tensor's position."""
    device = parts[0][1].rows.device
    kernel: Any = kernels("fingerprint", device.type) if device.type == "cuda" else None
    if kernel is not None:
        return kernel.LaidOut(parts, count).start

    def start() -> torch.Tensor:
        totals = [0] * count
        for number, matrix in parts:
            totals[number] += _matrix_number(matrix.in_rows())
        bits = np.array([total & MASK for total in totals], np.uint64).view(np.int64)
        return torch.from_numpy(bits).to(device)

    return start


def tensor_number(tensor: torch.Tensor, seed: int) -> int:
    """The number of all of a tensor. Waits for a GPU."""
    return NumberTable([[whole(tensor, seed)]]).numbers()[0]


def whole(tensor: torch.Tensor, seed: int) -> Box:
    return Box(tensor, tuple(tensor.shape), (0,) * tensor.dim(), seed)


def _matrices(box: Box, above: int = 0) -> Iterator[Matrix]:
    """The matrices of a box; `above` are rows of the full tensor before this part of it."""
    tensor, (_, full_shape, start, seed) = box.tensor.detach(), box
    inner = math.prod(full_shape[1:-1])  # rows for one step along the first dimension
    if tensor.dim() < 2:
        yield _matrix(tensor.reshape(1, -1), above, start[0] if start else 0, seed)
    elif tensor.dim() == 2:
        yield _matrix(tensor, above + start[0], start[1], seed)
    elif tensor.shape[1:-1] == full_shape[1:-1] and tensor.is_contiguous():
        yield _matrix(tensor.flatten(0, -2), above + start[0] * inner, start[-1], seed)
    else:
        for at, part in enumerate(tensor, start[0]):
            inside = Box(part, full_shape[1:], start[1:], seed)
            yield from _matrices(inside, above + at * inner)


def _matrix(rows: torch.Tensor, row: int, column: int, seed: int) -> Matrix:
    if len(rows) == 1:
        rows = rows.flatten()[None]  # whatever the step to the next row was
    return Matrix(rows, row, column * rows.element_size(), seed)


def _matrix_number(matrix: Matrix) -> int:
    rows, row, first_byte, seed = matrix
    words = (first_byte + rows.shape[1] * rows.element_size() + 1) // 2
    kernel: Any = None
    size = rows.element_size()
    # Whether every row is whole words, in memory, in its storage and in the full tensor.
    steps = (rows.storage_offset() * size, rows.shape[1] * size, rows.stride(0) * size)
    if all(place % 2 == 0 for place in (first_byte, rows.data_ptr(), *steps)):
        rows = rows.view(torch.int16)
        kernel = kernels("fingerprint", "cpu") if rows.is_cpu else None
    number = by_torch if kernel is None else kernel.matrix_number
    return int(number(rows, row, first_byte, seed, _column_keys(words)))


def by_torch(
    matrix: torch.Tensor, row: int, first_byte: int, seed: int, column_keys: np.ndarray
) -> int:
    """The definition in torch, for any device: the sum over a matrix whose rows are contiguous, mod 2^64."""
    if matrix.element_size() % 2 == 0:
        pieces, mask = matrix.view(torch.int16), 0xFFFF
        factors = column_keys[first_byte // 2 :][: pieces.shape[1]]
    else:
        pieces, mask = matrix.view(torch.uint8), 0xFF
        places = np.arange(first_byte, first_byte + pieces.shape[1], dtype=np.uint64)
        factors = column_keys[places // 2] << (places % 2 * np.uint64(8))
    across = _as_int64(factors, matrix.device)
    step = max(1, _CHUNK_ELEMENTS // pieces.shape[1])
    total = torch.zeros((), dtype=torch.int64, device=matrix.device)  # wraps as uint64 does
    for first in range(0, len(pieces), step):
        chunk = pieces[first : first + step].to(torch.int64) & mask
        down = _as_int64(keys(seed, row + first, len(chunk)), matrix.device)
        total += ((chunk * across).sum(1) * down).sum()
    return int(total) & MASK


def _as_int64(values: np.ndarray, device: torch.device) -> torch.Tensor:
    return torch.from_numpy(values.view(np.int64).copy()).to(device)


@functools.lru_cache(64)  # a model has few widths
def _column_keys(words: int) -> np.ndarray:
    return keys(COLUMN_SEED, 0, words)


def scaled_boxes(
    name: str,
    codes: torch.Tensor,
    scales: Sequence[torch.Tensor],
    full_shape: tuple[int, ...],
    start: tuple[int, ...],
    block: tuple[int, int],
) -> list[Box]:
    """Of a box that is served in FP8: its codes, and the scales of its blocks, each at its position.

    Codes are `[N, K]` e4m3fn, one matrix of a tensor that holds experts if there are any, or `[E, N, K]`; scales, of each
    matrix, `[ceil(N / block_n), ceil(K / block_k)]` FP32. Per channel a block is one row of the shard,
    `[1, columns]`: each rank's rows have scales of their own, and rank r's is column r of the tensor's scales.

    Raises:
        QuantizationError: the tensor is no matrix, the box starts or ends inside a block, or its scales are not
            those of its blocks.
    """
    grid = BlockGrid.of(full_shape, block, name)
    rows, columns = grid.scales_of(start[-2:], codes.shape[-2:], name=name)
    blocks = (rows.stop - rows.start, columns.stop - columns.start)
    if any(one.shape != blocks for one in scales):
        raise QuantizationError(
            name,
            f"scales {[list(one.shape) for one in scales]} of a box with {list(blocks)} blocks",
            "it is served in other blocks than it is sent in",
            "Send the tensor in the shape that its weight has",
        )
    full_scales, seed = (*full_shape[:-2], *grid.scale_shape), seed_of(name, "scale")
    experts = (1,) * (len(start) - 2)
    boxes = [
        Box(codes.view(*experts[codes.dim() - 2 :], *codes.shape), full_shape, start, seed_of(name))
    ]
    for at, one in enumerate(scales):
        place = (*(first + at for first in start[:-2]), rows.start, columns.start)
        boxes.append(Box(one.view(*experts, *one.shape), full_scales, place, seed))
    return boxes
