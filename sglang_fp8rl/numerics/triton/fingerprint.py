"""The fingerprint of `numerics/fingerprint.py` on a GPU: one read of the bytes, a sum per program.

A row is read four bytes, that is two words, at a time. What the rows of a program have in one column is
added up first, each times its row's key, so that a column's keys are read and multiplied once per program:
three instructions for a word. Row keys are made by a kernel of their own.
"""

from __future__ import annotations

import functools

import numpy as np
import torch
import triton
import triton.language as tl

from ..fingerprint import _column_keys
from .pieces import known_multiple

UNIT = 4  # bytes of a load's element: two words
ROWS, ROWS_AT_ONCE = 64, 8  # of a program; of which so many are read together
CHUNK, WARPS = 512, 4  # units of a program: 16 bytes a thread and row
KEYS = 1024  # row keys of a program


@triton.jit
def _mixed(x):
    x = (x ^ (x >> 30)) * tl.full((), 0xBF58476D1CE4E5B9, tl.uint64)
    x = (x ^ (x >> 27)) * tl.full((), 0x94D049BB133111EB, tl.uint64)
    return (x ^ (x >> 31)) | 1


@triton.jit(do_not_specialize=["seed", "first", "rows"])
def row_keys_kernel(out, seed, first, rows, BLOCK: tl.constexpr):
    """`keys(seed, first, rows)`: SplitMix64."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    count = (at + first + 1).to(tl.uint64)
    key = _mixed(count * tl.full((), 0x9E3779B97F4A7C15, tl.uint64) + seed.to(tl.uint64))
    tl.store(out + at, key.to(tl.int64, bitcast=True), mask=at < rows)


@triton.jit(do_not_specialize=["rows", "width", "stride"])
def rows_number_kernel(
    units,
    row_keys,
    column_keys,
    partial,
    rows,
    width,
    stride,
    ROWS: tl.constexpr,
    ROWS_AT_ONCE: tl.constexpr,
    CHUNK: tl.constexpr,
    ALIGN: tl.constexpr,
):
    """The sum over `ROWS` rows and `CHUNK` units; strides and widths in units."""
    column = tl.program_id(1).to(tl.int64) * CHUNK + tl.arange(0, CHUNK)
    is_column = column < known_multiple(width.to(tl.int64), ALIGN)
    step = known_multiple(stride.to(tl.int64), ALIGN)
    even = tl.zeros((CHUNK,), tl.uint64)
    odd = tl.zeros((CHUNK,), tl.uint64)
    first = tl.program_id(0).to(tl.int64) * ROWS
    for more in range(0, ROWS, ROWS_AT_ONCE):
        row = first + more + tl.arange(0, ROWS_AT_ONCE)
        is_row = row < rows
        key = tl.load(row_keys + row, mask=is_row, other=0).to(tl.uint64, bitcast=True)
        at = row[:, None] * step + column[None, :]
        unit = tl.load(units + at, mask=is_row[:, None] & is_column[None, :], other=0)
        unit = unit.to(tl.uint32, bitcast=True)
        even += tl.sum((unit & 0xFFFF).to(tl.uint64) * key[:, None], 0)
        odd += tl.sum((unit >> 16).to(tl.uint64) * key[:, None], 0)
    keys = column_keys + 2 * column
    across = tl.load(keys, mask=is_column, other=0).to(tl.uint64, bitcast=True)
    across_odd = tl.load(keys + 1, mask=is_column, other=0).to(tl.uint64, bitcast=True)
    total = tl.sum(even * across + odd * across_odd, 0)
    place = tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)
    tl.store(partial + place, total.to(tl.int64, bitcast=True))


def matrix_number(
    matrix: torch.Tensor, row: int, first_byte: int, seed: int, column_keys: np.ndarray
) -> torch.Tensor:
    """As `by_torch`, of a matrix that lies on units: int64 `[]` on its device, modulo 2^64."""
    rows, units = matrix.shape[0], matrix.view(torch.int32)
    width, stride = units.shape[1], units.stride(0)
    down = torch.empty(rows, dtype=torch.int64, device=matrix.device)
    grid = (triton.cdiv(rows, ROWS), triton.cdiv(width, CHUNK))
    partial = torch.empty(grid, dtype=torch.int64, device=matrix.device)
    across = _column_keys_on(matrix.device, column_keys.size)[first_byte // 2 :]
    is_aligned = not any(number % 4 for number in (matrix.data_ptr() // UNIT, stride, width))
    row_keys_kernel[(triton.cdiv(rows, KEYS),)](down, seed, row, rows, BLOCK=KEYS)
    rows_number_kernel[grid](
        units, down, across, partial, rows, width, stride,
        ROWS=ROWS, ROWS_AT_ONCE=ROWS_AT_ONCE, CHUNK=CHUNK, ALIGN=4 if is_aligned else 1,
        num_warps=WARPS,
    )  # fmt: skip
    return partial.sum()


@functools.cache
def _column_keys_on(device: torch.device, count: int) -> torch.Tensor:
    """A copy of the table that has so many."""
    return torch.from_numpy(_column_keys(count).view(np.int64).copy()).to(device)
