"""Casts and copies on a CPU, through Numba: one cast, or a `CastTable`; nothing the size of a tensor is allocated."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np
import torch

from ..grid import ceil_div
from ..write_table import BAD_SCALE, NAN_CODE, CastTable, Dtype, Kind
from .jit import array_at, by_rows, in_threads, jit, threads_for
from .kernels import (
    BF16_STEP,
    CODE,
    NO_STEP,
    SLIM,
    WIDE,
    _amax,
    _fp32_bits,
    _round,
    cast_region,
)

# A unit of work for a thread: rows of blocks of one piece, about this many elements.
_ELEMENTS_PER_ITEM = 256 * 1024
# Chunks of items per thread: one that was held up, or has the larger ones, leaves some to the others.
_CHUNKS_PER_THREAD = 16
# FP32 bits of Inf, and of the smallest number that is Inf in BF16.
_INF, _ROUNDS_TO_INF = 0x7F800000, 0x7F7F8000
_BAD_SCALE, _NAN_CODE = np.uint8(BAD_SCALE), np.uint8(NAN_CODE)
_COPY, _SCALES, _CODES, _FP32 = map(int, (Kind.COPY, Kind.SCALES, Kind.CODES, Dtype.FP32))


def cast_into(
    source: torch.Tensor,
    target: torch.Tensor,
    weight_scale: torch.Tensor,
    nonfinite: torch.Tensor,
    block: tuple[int, int],
    pow2_scale: bool,
    round_to_bf16: bool,
) -> None:
    """As `reference.cast_into`, for FP32 and BF16 in contiguous rows; a NaN in BF16 may have other bits.

    The bytes do not depend on the number of threads, which is torch's for a large tensor.
    """
    rows, cols = source.shape
    # Addresses, because arrays cost a small tensor more than its cast: each is three calls here.
    cast_rows = partial(
        cast_region,
        source.data_ptr(),
        WIDE if source.dtype == torch.float32 else SLIM,
        source.stride(0),
        target.data_ptr(),
        SLIM if target.dtype == torch.bfloat16 else CODE,
        target.stride(0),
        weight_scale.data_ptr(),
        *weight_scale.stride(),
        nonfinite.data_ptr(),
        rows,
        cols,
        *block,
        BF16_STEP if round_to_bf16 else NO_STEP,
        bool(pow2_scale),
    )
    by_rows(cast_rows, rows, cols, block[0])


class CpuTable:
    """A table with its work cut into items for threads.

    Args:
        pow2_scale, round_to_bf16: as in `cast_into`; copies take no notice of them.
    """

    def __init__(self, table: CastTable, *, pow2_scale: bool, round_to_bf16: bool) -> None:
        self.table = table
        self._items, self._scales_end = _items_of(table.pieces)
        self._elements = int((table.pieces["rows"] * table.pieces["cols"]).sum())
        self._flags = np.zeros(table.flag_count, np.uint8)
        self._run = partial(run_items, table.pieces, self._items)
        self._options = (BF16_STEP if round_to_bf16 else NO_STEP, bool(pow2_scale))

    def run(self, addresses: Sequence[int]) -> np.ndarray:
        """As `TableRunner.run`, in torch's number of threads; the bytes do not depend on it."""
        run = partial(self._run, np.asarray(addresses, np.int64), self._flags, *self._options)
        run(0, self._scales_end)
        threads = threads_for(self._elements)
        chunks = threads * _CHUNKS_PER_THREAD if threads > 1 else 1
        edges = np.linspace(self._scales_end, len(self._items), chunks + 1).astype(int)
        in_threads(run, edges.tolist(), threads)
        return self._flags


def _items_of(pieces: np.ndarray) -> tuple[np.ndarray, int]:
    """[items, 3]: piece, first row, end row; cut between rows of blocks. Those of scales come first.

    Codes ask the flags of their scales. Also returns where the scales' items end.
    """
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
def copy_rows(
    source, source_stride, target, target_stride, bad, cols, is_scales, row_start, row_stop
):
    """Copy rows that stay finite, and of scales those that are positive; to BF16 they are rounded."""
    narrow = target.itemsize == 2
    limit = np.uint32(_ROUNDS_TO_INF if narrow else _INF)
    for row in range(row_start, row_stop):
        x = source[row * source_stride : row * source_stride + cols]
        bad[row] = _amax(x, np.uint32(0)) >= limit or (is_scales and not _are_positive(x))
        if bad[row]:
            continue
        out = target[row * target_stride : row * target_stride + cols]
        if narrow:
            for c in range(cols):
                bits = _round(_fp32_bits(x[c]), BF16_STEP)
                out[c] = out.dtype.type(bits >> np.uint32(16))
        else:
            for c in range(cols):
                out[c] = out.dtype.type(_fp32_bits(x[c]))


@jit
def _are_positive(x):
    largest = np.uint32(0)
    for c in range(x.size):  # one less and unsigned, zero and what is negative are above Inf
        largest = max(largest, np.uint32(_fp32_bits(x[c]) - np.uint32(1)))
    return largest < np.uint32(_INF)


@jit
def copy_codes(
    source, source_stride, destination, destination_stride, bad, cols, block_n, row_start, row_stop
):
    """Copy rows of codes whose scales were copied and none of which is NaN."""
    for row in range(row_start, row_stop):
        if bad[row // block_n] == _BAD_SCALE:
            continue
        x = source[row * source_stride : row * source_stride + cols]
        largest = np.uint8(0)
        for c in range(cols):
            largest = max(largest, np.uint8(x[c] & np.uint8(0x7F)))
        if largest == np.uint8(0x7F):
            bad[row // block_n] = _NAN_CODE
            continue
        out = destination[row * destination_stride : row * destination_stride + cols]
        for c in range(cols):
            out[c] = x[c]


@jit
def run_items(pieces, items, addresses, flags, step, pow2_scale, first, last):
    """Items `first` to `last` of a table; releases the GIL."""
    for number in range(first, last):
        piece, start, stop = pieces[items[number, 0]], items[number, 1], items[number, 2]
        rows, cols, kind = piece["rows"], piece["cols"], piece["kind"]
        address = addresses[piece["source"]] + piece["source_offset"]
        target = piece["destination"]
        stride, out_stride = piece["source_stride"], piece["destination_stride"]
        span, out_span = (rows - 1) * stride + cols, (rows - 1) * out_stride + cols
        is_wide, to_wide = piece["source_dtype"] == _FP32, piece["destination_dtype"] == _FP32
        wide, slim = array_at(address, span, WIDE), array_at(address, span, SLIM)
        out32, out16 = array_at(target, out_span, WIDE), array_at(target, out_span, SLIM)
        bad = flags[piece["flags"] :]
        if kind == _CODES:
            codes, out8 = array_at(address, span, CODE), array_at(target, out_span, CODE)
            copy_codes(codes, stride, out8, out_stride, bad, cols, piece["block_n"], start, stop)
        elif kind in (_COPY, _SCALES):
            how = (cols, kind == _SCALES, start, stop)
            if is_wide and to_wide:
                copy_rows(wide, stride, out32, out_stride, bad, *how)
            elif is_wide:
                copy_rows(wide, stride, out16, out_stride, bad, *how)
            elif to_wide:
                copy_rows(slim, stride, out32, out_stride, bad, *how)
            else:
                copy_rows(slim, stride, out16, out_stride, bad, *how)
        else:
            scales = (piece["scales"], piece["scales_stride0"], piece["scales_stride1"])
            region = (np.int64(bad.ctypes.data), rows, cols, piece["block_n"], piece["block_k"])
            if is_wide:
                cast_region(
                    address, WIDE, stride, target, CODE, out_stride, *scales, *region,
                    step, pow2_scale, start, stop,
                )  # fmt: skip
            else:
                cast_region(
                    address, SLIM, stride, target, CODE, out_stride, *scales, *region,
                    step, pow2_scale, start, stop,
                )  # fmt: skip
