"""The fingerprint of `numerics/fingerprint.py` on a GPU: many matrices in a launch, each read once.

A program adds up a tile: in each thread the words of a row times their columns' keys, that times the row's key, and
at the end what the threads have. Keys are computed, not read, and each serves all that a thread reads in its row or
column.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import triton
import triton.language as tl

from ...formats.format import ceil_div
from ..fingerprint import COLUMN_SEED, MIX1, MIX2, STEP, Matrix
from .arithmetic import on_device

Part = tuple[int, Matrix]
# A `Matrix` as numbers, stride and width in bytes; then the number that it is a part of, and its first program.
_FIELDS = ("address", "stride", "rows", "width", "row", "first_byte", "seed", "number", "first")
_ADDRESS, _STRIDE, _ROWS, _WIDTH, _ROW, _BYTE, _SEED, _NUMBER, _FIRST = map(
    tl.constexpr, range(len(_FIELDS))
)
_COUNT = tl.constexpr(len(_FIELDS))
_STEP, _MIX1, _MIX2 = tl.constexpr(int(STEP)), tl.constexpr(int(MIX1)), tl.constexpr(int(MIX2))
_COLUMN_SEED = tl.constexpr(COLUMN_SEED)

_WIDEST = 16  # bytes of a load
# A thread reads 16 rows, in one load each.
HEIGHT, LANES, WARPS = 64, 32, 4


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
    """One tile of a matrix per program, columns fastest: `HEIGHT` rows of `LANES * ALIGN` bytes.

    Of `matrices`, int64 [matrices, fields], `owners`, int32 [programs], says which. Each program adds what it finds to the
    int64 `numbers`. `ALIGN` bytes divide address, stride, width and first byte of each.
    """
    row = matrices + tl.load(owners + tl.program_id(0)).to(tl.int64) * _COUNT
    tile = tl.program_id(0) - tl.load(row + _FIRST).to(tl.int32)
    width = tl.load(row + _WIDTH)
    across = tl.cdiv(width, LANES * ALIGN).to(tl.int32)
    first_row = (tile // across).to(tl.int64) * HEIGHT
    first_byte = (tile % across).to(tl.int64) * (LANES * ALIGN)
    UNIT: tl.constexpr = ALIGN if ALIGN < 4 else 4
    EACH: tl.constexpr = ALIGN // UNIT
    bits: tl.constexpr = tl.int32 if UNIT == 4 else (tl.int16 if UNIT == 2 else tl.int8)
    n = tl.arange(0, HEIGHT)
    k = tl.arange(0, LANES * EACH)
    is_row = n < tl.minimum(tl.load(row + _ROWS) - first_row, HEIGHT).to(tl.int32)
    units = tl.minimum((width - first_byte) // ALIGN, LANES).to(tl.int32) * EACH
    stride = tl.load(row + _STRIDE)
    address = tl.load(row + _ADDRESS) + first_byte + first_row * stride
    source = tl.multiple_of(address.to(tl.pointer_type(bits)), ALIGN)
    source += n[:, None] * (stride // ALIGN * EACH)
    x = tl.load(source + k[None, :], mask=is_row[:, None] & (k < units)[None, :], other=0)
    byte = tl.load(row + _BYTE) + first_byte
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
    down = keys_of(tl.load(row + _SEED).to(tl.uint64), tl.load(row + _ROW) + first_row, n)
    # What a thread has of a row, times the row's key: fewer products, and no sum across threads but the last.
    found = tl.reshape(found, [HEIGHT, LANES, EACH])
    total = tl.sum(found, axis=2) * down[:, None]
    total = tl.sum(tl.reshape(total, [HEIGHT * LANES]), axis=0)
    tl.atomic_add(numbers + tl.load(row + _NUMBER), total.to(tl.int64))


class LaidOut:
    """Matrices of one GPU, each with the position of the tensor (one of `count`) that it is a part of, as tables there.
    Those that do not lie in rows are copied and laid out anew by each call."""

    def __init__(self, parts: Sequence[Part], count: int) -> None:
        self._count, self._device = count, parts[0][1].rows.device
        self._held = [part for part in parts if part[1].lies_in_rows]
        self._turned = [part for part in parts if not part[1].lies_in_rows]
        self._launches = self._laid_out(self._held)

    def start(self) -> torch.Tensor:
        """As `numerics.fingerprint.NumberTable.start`."""
        numbers = torch.zeros(self._count, dtype=torch.int64, device=self._device)
        copies = [(number, matrix.in_rows()) for number, matrix in self._turned]
        sizes = {"HEIGHT": HEIGHT, "LANES": LANES, "num_warps": WARPS}
        with torch.cuda.device_of(numbers):  # on which Triton launches
            for align, table, owners in [*self._launches, *self._laid_out(copies)]:
                numbers_kernel[(len(owners),)](table, owners, numbers, ALIGN=align, **sizes)
        return numbers

    def _laid_out(self, parts: Sequence[Part]) -> list[tuple[int, torch.Tensor, torch.Tensor]]:
        """A launch for those whose rows lie on 16 bytes, others for what lies on 4, 2 or 1: that, their table, and
        of each program its matrix."""
        fields = [_fields(number, matrix) for number, matrix in parts]
        table = np.array(fields, np.uint64).reshape(-1, len(_FIELDS)).view(np.int64)
        places = [_FIELDS.index(name) for name in ("address", "stride", "width", "first_byte")]
        divides = np.bitwise_or.reduce(table[:, places], axis=1) | _WIDEST
        aligns = divides & -divides
        aligns[aligns == 8] = 4  # a launch less
        launches = []
        for align in np.unique(aligns).tolist():
            matrices = table[aligns == align]
            rows, width = matrices[:, _FIELDS.index("rows")], matrices[:, _FIELDS.index("width")]
            tiles = ceil_div(rows, HEIGHT) * ceil_div(width, LANES * align)
            matrices[:, -1] = np.cumsum(tiles) - tiles
            owners = np.repeat(np.arange(len(matrices), dtype=np.int32), tiles)
            launches.append(
                (align, on_device(matrices, self._device), on_device(owners, self._device))
            )
        return launches


def _fields(number: int, matrix: Matrix) -> tuple[int, ...]:
    (rows, columns), size = matrix.rows.shape, matrix.rows.element_size()
    stride = matrix.rows.stride(0) * size if rows > 1 else 0
    where = (matrix.rows.data_ptr(), stride, rows, columns * size)
    return (*where, matrix.row, matrix.first_byte, matrix.seed, number, 0)
