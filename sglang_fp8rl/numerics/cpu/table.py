"""Casts and copies on a CPU, through Numba: one cast, or a `CastTable`; nothing the size of a tensor is allocated."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from ...formats.format import ceil_div
from ..write_table import BAD_SCALE, BF16, DTYPES, FP16, FP32, NAN_CODE, CastTable, Kind
from .jit import array_at, by_rows, in_threads, jit, threads_for
from .kernels import (
    BF16_STEP,
    CODE,
    HALF,
    NO_STEP,
    SLIM,
    UNITS,
    WIDE,
    _amax,
    _fp32_bits,
    cast_region,
    narrowed,
)

# A unit of work for a thread: rows of blocks of one piece, about this many elements.
_ELEMENTS_PER_ITEM = 256 * 1024
# Chunks of items per thread: one that was held up, or has the larger ones, leaves some to the others.
_CHUNKS_PER_THREAD = 16
# FP32 bits of the smallest number that is Inf in a dtype, by its number.
_INF = 0x7F800000
_ROUNDS_TO_INF = np.zeros(len(DTYPES), np.uint32)
_ROUNDS_TO_INF[[FP32, BF16, FP16]] = _INF, 0x7F7F8000, 0x477FF000
_BAD_SCALE, _NAN_CODE = np.uint8(BAD_SCALE), np.uint8(NAN_CODE)
_CAST, _SCALES, _CODES = map(int, (Kind.CAST, Kind.SCALES, Kind.CODES))


def cast_into(
    source: torch.Tensor,
    target: torch.Tensor,
    weight_scale: torch.Tensor,
    nonfinite: torch.Tensor,
    block: tuple[int, int],
    pow2_scale: bool,
    round_to_bf16: bool,
) -> None:
    """As `reference.cast_into`, of contiguous rows; a NaN in BF16 may have other bits.

    The bytes do not depend on the number of threads, which is torch's for a large tensor.
    """
    (rows, cols), step = source.shape, BF16_STEP if round_to_bf16 else NO_STEP
    places = (*_places(source, target), weight_scale.data_ptr(), *weight_scale.stride())
    shape = (nonfinite.data_ptr(), rows, cols, *block)
    by_rows(partial(cast_region, *places, *shape, step, bool(pow2_scale)), rows, cols, block[0])


def copy_into(source: torch.Tensor, target: torch.Tensor, bad: torch.Tensor) -> None:
    """As `cast.copy_finite_into` of what a `Piece` of COPY may be; `bad`, bool [rows], says which rows stayed."""
    rows, cols = source.shape
    how = (bad.data_ptr(), rows, cols, DTYPES[target.dtype], False)
    by_rows(partial(copy_region, *_places(source, target), *how), rows, cols, 1)


def _places(source: torch.Tensor, target: torch.Tensor) -> tuple[Any, ...]:
    """Addresses, because arrays cost a small tensor more than its cast: each is three calls here."""
    of_source = (source.data_ptr(), UNITS[source.dtype], source.stride(0))
    return (*of_source, target.data_ptr(), UNITS[target.dtype], target.stride(0))


class CpuTable:
    """A table with its work cut into items for threads."""

    def __init__(self, table: CastTable, *, pow2_scale: bool, round_to_bf16: bool) -> None:
        self.table = table
        self._items, self._scales_end = _items_of(table.pieces)
        self._elements = int((table.pieces["rows"] * table.pieces["cols"]).sum())
        self._flags = np.zeros(table.flag_count, np.uint8)
        self._run = partial(run_items, table.pieces, self._items)
        self._options = (BF16_STEP if round_to_bf16 else NO_STEP, bool(pow2_scale))

    def start(self, addresses: Sequence[int]) -> None:
        """As `TableRunner.start`, in torch's number of threads; the bytes do not depend on it."""
        run = partial(self._run, np.asarray(addresses, np.int64), self._flags, *self._options)
        run(0, self._scales_end)
        threads = threads_for(self._elements)
        chunks = threads * _CHUNKS_PER_THREAD if threads > 1 else 1
        edges = np.linspace(self._scales_end, len(self._items), chunks + 1).astype(int)
        in_threads(run, edges.tolist(), threads)

    def wait(self) -> np.ndarray:
        return self._flags

    def run(self, addresses: Sequence[int]) -> np.ndarray:
        self.start(addresses)
        return self._flags


def _items_of(pieces: np.ndarray) -> tuple[np.ndarray, int]:
    """[items, 3]: piece, first row, end row; cut between rows of blocks. Those of scales, whose flags codes ask, come
    first; returns where they end, too."""
    is_scales = pieces["kind"] == Kind.SCALES
    order = np.argsort(~is_scales, kind="stable")
    rows, cols, block_n = (pieces[name][order] for name in ("rows", "cols", "block_n"))
    height = np.maximum(1, _ELEMENTS_PER_ITEM // (cols * block_n)) * block_n
    count = ceil_div(rows, height)  # of items, per piece
    number = np.arange(count.sum()) - np.repeat(np.cumsum(count) - count, count)  # within its piece
    first = number * np.repeat(height, count)
    end = np.minimum(first + np.repeat(height, count), np.repeat(rows, count))
    items = np.stack([np.repeat(order, count), first, end], axis=1)
    return items, int(count[: np.count_nonzero(is_scales)].sum())


@jit
def copy_region(
    source, source_unit, source_stride, target, target_unit, target_stride, flags, rows, cols,
    target_dtype, is_scales, row_start, row_stop,
):  # fmt: skip
    """Copy rows that stay finite, and of scales those that are positive, rounded to nearest even. Arguments are those of
    `cast_region`; a flag for each row."""
    x = array_at(source, (rows - 1) * source_stride + cols, source_unit)
    out = array_at(target, (rows - 1) * target_stride + cols, target_unit)
    bad = array_at(flags, rows, np.uint8(0))
    for row in range(row_start, row_stop):
        values = x[row * source_stride : row * source_stride + cols]
        bad[row] = _amax(values, np.uint32(0)) >= _ROUNDS_TO_INF[target_dtype] or (
            is_scales and not _are_positive(values)
        )
        if bad[row]:
            continue
        to = out[row * target_stride : row * target_stride + cols]
        for c in range(cols):
            to[c] = narrowed(_fp32_bits(values[c]), to[c])


@jit
def _are_positive(x):
    largest = np.uint32(0)
    for c in range(x.size):  # one less and unsigned, zero and what is negative are above Inf
        largest = max(largest, np.uint32(_fp32_bits(x[c]) - np.uint32(1)))
    return largest < np.uint32(_INF)


@jit
def copy_codes(source, piece, bad, row_start, row_stop):
    """Copy rows of codes whose scales were copied and none of which is NaN."""
    cols, block_n = piece["cols"], piece["block_n"]
    for row in range(row_start, row_stop):
        if bad[row // block_n] == _BAD_SCALE:
            continue
        x = array_at(source + row * piece["source_stride"], cols, CODE)
        largest = np.uint8(0)
        for c in range(cols):
            largest = max(largest, np.uint8(x[c] & np.uint8(0x7F)))
        if largest == np.uint8(0x7F):
            bad[row // block_n] = _NAN_CODE
            continue
        out = array_at(piece["destination"] + row * piece["destination_stride"], cols, CODE)
        for c in range(cols):
            out[c] = x[c]


@jit
def run_piece(unit, source, piece, flags, step, pow2_scale, start, stop):
    """Rows `start` to `stop` of a piece whose source has elements of that `unit`."""
    kind, dtype = piece["kind"], piece["destination_dtype"]
    places = (source, unit, piece["source_stride"], piece["destination"])
    shape = (np.int64(flags.ctypes.data), piece["rows"], piece["cols"])
    stride = piece["destination_stride"]
    if kind == _CAST:
        scales = (piece["scales"], piece["scales_stride0"], piece["scales_stride1"])
        how = (piece["block_n"], piece["block_k"], step, pow2_scale, start, stop)
        cast_region(*places, CODE, stride, *scales, *shape, *how)
    else:
        rest = (stride, *shape, dtype, kind == _SCALES, start, stop)
        if dtype == FP32:
            copy_region(*places, WIDE, *rest)
        elif dtype == BF16:
            copy_region(*places, SLIM, *rest)
        else:
            copy_region(*places, HALF, *rest)


@jit
def run_items(pieces, items, addresses, flags, step, pow2_scale, first, last):
    """Items `first` to `last` of a table; releases the GIL."""
    for number in range(first, last):
        piece, start, stop = pieces[items[number, 0]], items[number, 1], items[number, 2]
        source = addresses[piece["source"]] + piece["source_offset"]
        bad = flags[piece["flags"] :]
        rest = (source, piece, bad, step, pow2_scale, start, stop)
        if piece["kind"] == _CODES:
            copy_codes(source, piece, bad, start, stop)
        elif piece["source_dtype"] == FP32:
            run_piece(WIDE, *rest)
        elif piece["source_dtype"] == BF16:
            run_piece(SLIM, *rest)
        else:
            run_piece(HALF, *rest)
