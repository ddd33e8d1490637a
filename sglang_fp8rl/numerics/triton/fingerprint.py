"""The fingerprint of `numerics/fingerprint.py` on a GPU: many matrices in a launch, each read once.

A program adds up a tile: in each thread the words of a row times their columns' keys, that times the row's key, and
at the end what the threads have. Keys are computed, not read, and each serves all that a thread reads in its row or
column.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl

from ...formats.format import ceil_div
from ..fingerprint import COLUMN_SEED, MIX1, MIX2, STEP, Matrix
from .arithmetic import Constant, on_device

Part = tuple[int, Matrix]
Launch = tuple[Any, int, tuple[Any, ...], int]  # kernel, programs, arguments in front, `ALIGN`
# A `Matrix` as numbers, stride and width in bytes; then the number that it is a part of, and its first program.
_FIELDS = ("address", "stride", "rows", "width", "row", "first_byte", "seed", "number", "first")
_ADDRESS, _STRIDE, _ROWS, _WIDTH, _ROW, _BYTE, _SEED, _NUMBER, _FIRST = map(
    Constant, range(len(_FIELDS))
)
_COUNT = Constant(len(_FIELDS))
_STEP, _MIX1, _MIX2 = Constant(int(STEP)), Constant(int(MIX1)), Constant(int(MIX2))
_COLUMN_SEED = Constant(COLUMN_SEED)

_WIDEST = 16  # bytes of a load
# A thread reads 16 rows, in one load each.
HEIGHT, LANES, WARPS = 64, 32, 4
FEW = 4  # matrices that cost less one by one than a table of them, which is uploaded


@triton.jit
def keys_of(seed, first, offset):
    """`numerics.fingerprint.keys` at `first` (int64) and an `offset` from there (not negative, int32)."""
    base = seed + (first + 1).to(tl.uint64) * _STEP
    x = base + offset.to(tl.uint32).to(tl.uint64) * _STEP
    x = (x ^ (x >> 30)) * _MIX1
    x = (x ^ (x >> 27)) * _MIX2
    return (x ^ (x >> 31)) | 1


@triton.jit
def numbers_kernel(
    matrices, owners, numbers, ALIGN: tl.constexpr, HEIGHT: tl.constexpr, LANES: tl.constexpr
):  # fmt: skip
    """One tile of a matrix per program. Of `matrices`, int64 [matrices, fields], `owners`, int32 [programs], says which."""
    row = matrices + tl.load(owners + tl.program_id(0)).to(tl.int64) * _COUNT
    count_tile(
        tl.program_id(0) - tl.load(row + _FIRST).to(tl.int32),
        tl.load(row + _ADDRESS), tl.load(row + _STRIDE), tl.load(row + _ROWS), tl.load(row + _WIDTH),
        tl.load(row + _ROW), tl.load(row + _BYTE), tl.load(row + _SEED),
        numbers + tl.load(row + _NUMBER), ALIGN, HEIGHT, LANES,
    )  # fmt: skip


@triton.jit(do_not_specialize=[name for name in _FIELDS if name != "first"])
def matrix_number_kernel(
    address, stride, rows, width, row, first_byte, seed, number, numbers,
    ALIGN: tl.constexpr, HEIGHT: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """The same of one matrix, its fields given as plain numbers: nothing is uploaded."""
    count_tile(
        tl.program_id(0), address.to(tl.int64), stride.to(tl.int64), rows.to(tl.int64), width.to(tl.int64),
        row.to(tl.int64), first_byte.to(tl.int64), seed.to(tl.int64), numbers + number,
        ALIGN, HEIGHT, LANES,
    )  # fmt: skip


@triton.jit
def count_tile(
    tile, address, stride, rows, width, matrix_row, byte, seed, number,
    ALIGN: tl.constexpr, HEIGHT: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """Add what a tile has to the int64 `number`: columns fastest, `HEIGHT` rows of `LANES * ALIGN` bytes. `ALIGN` bytes divide
    address, stride, width and first byte."""
    across = tl.cdiv(width, LANES * ALIGN).to(tl.int32)
    first_row = (tile // across).to(tl.int64) * HEIGHT
    first_byte = (tile % across).to(tl.int64) * (LANES * ALIGN)
    UNIT: tl.constexpr = ALIGN if ALIGN < 4 else 4
    EACH: tl.constexpr = ALIGN // UNIT
    bits: tl.constexpr = tl.int32 if UNIT == 4 else (tl.int16 if UNIT == 2 else tl.int8)
    n = tl.arange(0, HEIGHT)
    k = tl.arange(0, LANES * EACH)
    is_row = n < tl.minimum(rows - first_row, HEIGHT).to(tl.int32)
    units = tl.minimum((width - first_byte) // ALIGN, LANES).to(tl.int32) * EACH
    start = address + first_byte + first_row * stride
    source = tl.multiple_of(start.to(tl.pointer_type(bits)), ALIGN)
    source += n[:, None] * (stride // ALIGN * EACH)
    x = tl.load(source + k[None, :], mask=is_row[:, None] & (k < units)[None, :], other=0)
    byte += first_byte
    if UNIT == 4:
        # Of x = a + b * 2^16 the words' a * first + b * second, without taking out a.
        first = keys_of(_COLUMN_SEED, byte // 2, k * 2)
        second = keys_of(_COLUMN_SEED, byte // 2 + 1, k * 2) - (first << 16)
        x = x.to(tl.uint32, bitcast=True)
        found = x.to(tl.uint64) * first[None, :] + (x >> 16).to(tl.uint64) * second[None, :]
    else:
        place = (byte % 2).to(tl.int32) + k * UNIT
        key = keys_of(_COLUMN_SEED, byte // 2, place // 2) << (place % 2 * 8).to(tl.uint64)
        found = (x.to(tl.int32) & (0xFFFF if UNIT == 2 else 0xFF)).to(tl.uint64) * key[None, :]
    down = keys_of(seed.to(tl.uint64), matrix_row + first_row, n)
    # What a thread has of a row, times the row's key: fewer products, and no sum across threads but the last.
    found = tl.reshape(found, [HEIGHT, LANES, EACH])
    total = tl.sum(found, axis=2) * down[:, None]
    total = tl.sum(tl.reshape(total, [HEIGHT * LANES]), axis=0)
    tl.atomic_add(number, total.to(tl.int64))


class LaidOut:
    """Matrices of one GPU, each with the position of the tensor (one of `count`) that it is a part of: a few as they are, a
    launch each; many as tables there. Those that do not lie in rows are copied, and laid out anew, by each call."""

    def __init__(self, parts: Sequence[Part], count: int) -> None:
        self._count, self._device = count, parts[0][1].rows.device
        self._held = [part for part in parts if part[1].lies_in_rows]
        self._turned = [part for part in parts if not part[1].lies_in_rows]
        self._launches = self._laid_out(self._held)

    def start(self) -> torch.Tensor:
        """As `numerics.fingerprint.NumberTable.start`."""
        numbers = torch.zeros(self._count, dtype=torch.int64, device=self._device)
        copies = [(number, matrix.in_rows()) for number, matrix in self._turned]
        with torch.cuda.device_of(numbers):  # on which Triton launches
            for kernel, programs, args, align in [*self._launches, *self._laid_out(copies)]:
                kernel[(programs,)](
                    *args, numbers=numbers, ALIGN=align, HEIGHT=HEIGHT, LANES=LANES, num_warps=WARPS
                )
        return numbers

    def _laid_out(self, parts: Sequence[Part]) -> list[Launch]:
        """A launch for those whose rows lie on 16 bytes, others for what lies on 4, 2 or 1."""
        fields = [_fields(number, matrix) for number, matrix in parts]
        aligns = [_align(one) for one in fields]
        if len(parts) <= FEW:
            return [
                (matrix_number_kernel, _tiles(one, align), one[:-1], align)
                for one, align in zip(fields, aligns, strict=True)
            ]
        table = np.array(fields, np.int64)
        launches: list[Launch] = []
        for align in sorted(set(aligns)):
            matrices = table[np.array(aligns) == align]
            tiles = _tiles(matrices.T, align)
            matrices[:, -1] = np.cumsum(tiles) - tiles
            owners = np.repeat(np.arange(len(matrices), dtype=np.int32), tiles)
            tables = (on_device(matrices, self._device), on_device(owners, self._device))
            launches.append((numbers_kernel, len(owners), tables, align))
        return launches


def _fields(number: int, matrix: Matrix) -> tuple[int, ...]:
    (rows, columns), size = matrix.rows.shape, matrix.rows.element_size()
    stride = matrix.rows.stride(0) * size if rows > 1 else 0
    where = (matrix.rows.data_ptr(), stride, rows, columns * size)
    # The same bits with a sign: Triton compiles anew for numbers of another kind.
    seed = matrix.seed - (matrix.seed >> 63 << 64)
    return (*where, matrix.row, matrix.first_byte, seed, number, 0)


def _align(fields: tuple[int, ...]) -> int:
    """Bytes of a load: they divide address, stride, width and first byte."""
    address, stride, _, width, _, first_byte, *_ = fields
    divides = address | stride | width | first_byte | _WIDEST
    align = divides & -divides
    return 4 if align == 8 else align  # a launch less


def _tiles(fields: Any, align: int) -> Any:
    """Programs of a matrix, or of each of many whose fields are arrays."""
    _, _, rows, width, *_ = fields
    return ceil_div(rows, HEIGHT) * ceil_div(width, LANES * align)
