"""A 64-bit number of a tensor's bytes that adds up over any boxes the tensor is cut into.

A tensor is read as a matrix of bytes, its last dimension along the rows, and each two bytes of a row as
one little-endian 16-bit word, so that an FP8 row of 4096 has 2048 words and a BF16 row 4096:

    number = sum over rows r, words j of  R[r] * C[j] * word[r, j]   (mod 2^64)

`R` and `C` are odd 64-bit keys, drawn by SplitMix64 (Steele, Lea, Flood 2014) from the row and word's
position in the *full* tensor; the rows' also from a seed. The number is linear in the bytes, so that of a
tensor is the sum of those of its shards, whatever boxes they are, down to single bytes; and what was
computed twice (a replica) is the same twice.

**Odds of a collision**, for a difference that does not know the keys. One changed word always changes the
number: a product of odd numbers and a difference below 2^16 is not 0 mod 2^64. For any difference at
all: let 2^v be the largest power of two that divides every changed word's difference, v < 16. Some row
then has an odd part, whose sum over `C` is divisible by 2^k with odds of at most 2^(1-k), and the sum
over `R` vanishes with odds of at most 2^-(63-v-k); summed over k, at most (64-v) * 2^-(62-v): 2^-56 for
v = 0, as almost every change is, and 2^-41 if nothing but signs of BF16 changed. It guards against
errors, not against someone who searches for a collision: the keys are public.
"""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from .backends import kernels
from .grid import BlockGrid

MASK = (1 << 64) - 1
_STEP, _MIX1, _MIX2 = map(np.uint64, (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))
_COLUMN_SEED = 0x6670386C72306B31
# This much is widened to int64 at a time.
_CHUNK_ELEMENTS = 2 * 1024 * 1024


def seed_of(name: str, part: str = "") -> int:
    """The seed of a tensor's rows: 64 bits of BLAKE2b over its name and which part of it this is."""
    text = f"{name}\0{part}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")


def keys(seed: int, first: int, count: int) -> np.ndarray:
    """uint64 `[count]`, odd: SplitMix64's outputs number `first`, `first + 1`, … from a seed."""
    with np.errstate(over="ignore"):
        x = np.arange(first + 1, first + count + 1, dtype=np.uint64) * _STEP + np.uint64(seed)
        x = (x ^ (x >> np.uint64(30))) * _MIX1
        x = (x ^ (x >> np.uint64(27))) * _MIX2
        return (x ^ (x >> np.uint64(31))) | np.uint64(1)


def box_number(
    box: torch.Tensor, full_shape: tuple[int, ...], start: tuple[int, ...], seed: int
) -> int:
    """The number of one box of a tensor, to be added (mod 2^64) to those of the others.

    Args:
        box: what lies at `start` of the full tensor; any dtype of 1, 2, 4 or 8 bytes, any strides, any
            device. Its bytes are read where they are.
        full_shape: of the tensor. One of fewer than two dimensions is a matrix of one row.
        seed: of the tensor (`seed_of`).

    Returns:
        0 to 2^64 - 1. Waits for a GPU.
    """
    if not box.numel():
        return 0
    total = 0
    for matrix, row, column in _matrices(box.detach(), full_shape, start):
        total += _matrix_number(matrix, row, column, seed)
    return total & MASK


def tensor_number(tensor: torch.Tensor, seed: int) -> int:
    """`box_number` of all of a tensor."""
    return box_number(tensor, tuple(tensor.shape), (0,) * tensor.dim(), seed)


def _matrices(
    box: torch.Tensor, full_shape: tuple[int, ...], start: tuple[int, ...]
) -> Iterator[tuple[torch.Tensor, int, int]]:
    """The box as matrices whose rows follow each other in the full tensor: `(matrix, row, column)`."""
    if box.dim() < 2:
        yield box.reshape(1, -1), 0, start[0] if start else 0
        return
    inner = math.prod(full_shape[1:-1])  # rows for one step along the first dimension
    if box.dim() == 2:
        yield box, start[0], start[1]
    elif box.shape[1:-1] == full_shape[1:-1] and box.is_contiguous():
        yield box.flatten(0, -2), start[0] * inner, start[-1]
    else:
        for at, part in enumerate(box):
            for matrix, row, column in _matrices(part, full_shape[1:], start[1:]):
                yield matrix, (start[0] + at) * inner + row, column


def _matrix_number(matrix: torch.Tensor, row: int, column: int, seed: int) -> int:
    if len(matrix) == 1:
        matrix = matrix.flatten()[None]  # whatever the step to the next row was
    if matrix.stride(1) != 1 or matrix.stride(0) < matrix.shape[1]:
        # Not `contiguous`, which leaves a side of one element the step that it had.
        matrix = matrix.clone(memory_format=torch.contiguous_format)
    first_byte = column * matrix.element_size()
    words = (first_byte + matrix.shape[1] * matrix.element_size() + 1) // 2
    kernel: Any = None
    if _lies_on_words(matrix, first_byte):
        matrix = matrix.view(torch.int16)
        kernel = kernels("fingerprint", "cpu") if matrix.is_cpu else None
    number = by_torch if kernel is None else kernel.matrix_number
    return int(number(matrix, row, first_byte, seed, _column_keys(words)))


def _lies_on_words(matrix: torch.Tensor, first_byte: int) -> bool:
    """Whether every row is whole words, in memory and in the full tensor."""
    size = matrix.element_size()
    places = (first_byte, matrix.data_ptr(), matrix.shape[1] * size, matrix.stride(0) * size)
    return not any(place % 2 for place in places)


def by_torch(
    matrix: torch.Tensor, row: int, first_byte: int, seed: int, column_keys: np.ndarray
) -> int:
    """The definition in torch, for any device: the sum over a matrix whose rows are contiguous, mod 2^64.

    Args:
        row, first_byte: where it starts in the full tensor.
    """
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


def _column_keys(words: int) -> np.ndarray:
    """At least `words` of them: one table, made for the next power of two."""
    return _column_table(max(12, (words - 1).bit_length()))


@functools.cache
def _column_table(bits: int) -> np.ndarray:
    return keys(_COLUMN_SEED, 0, 1 << bits)


def plain_number(
    name: str, box: torch.Tensor, full_shape: tuple[int, ...], start: tuple[int, ...]
) -> int:
    """Of a box that is served as it is: its elements, in the dtype they are served in."""
    return box_number(box, full_shape, start, seed_of(name))


def scaled_number(
    name: str,
    codes: torch.Tensor,
    scales: torch.Tensor,
    full_shape: tuple[int, ...],
    start: tuple[int, ...],
    block: tuple[int, int],
) -> int:
    """Of a box that is served in FP8: its codes, and the scales of its blocks, each at its position.

    Args:
        codes: `[N, K]` e4m3fn at `start` of the full tensor, of which it is one matrix if that holds experts;
            or `[E, N, K]`.
        scales: `[ceil(N / block_n), ceil(K / block_k)]` FP32, with the codes' leading dimension.
        block: `[block_n, block_k]`. Per channel it is one row of the shard, `[1, columns]`: each rank's
            rows have scales of their own, and rank r's is column r of the tensor's scales.

    Raises:
        QuantizationError: the box starts or ends inside a block.
    """
    grid = BlockGrid((full_shape[-2], full_shape[-1]), block)
    rows, columns = grid.scales_of(start[-2:], codes.shape[-2:], name=name)
    if codes.dim() < len(start):
        codes, scales = codes.unsqueeze(0), scales.unsqueeze(0)
    full_scales, at = (
        (*full_shape[:-2], *grid.scale_shape),
        (*start[:-2], rows.start, columns.start),
    )
    of_scales = box_number(scales, full_scales, at, seed_of(name, "scale"))
    return MASK & (box_number(codes, full_shape, start, seed_of(name)) + of_scales)
