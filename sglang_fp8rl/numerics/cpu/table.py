"""Run a `CastTable` on a CPU: one call, the same kernels and bytes as `cast.py`."""

# Numba reads these functions, not their annotations.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import pairwise

import numba
import numpy as np
import torch

from ..grid import ceil_div
from ..write_table import BAD_SCALE, NAN_CODE, PIECE, CastTable, Dtype, Kind
from .cast import BF16_STEP, ELEMENTS_PER_THREAD, NO_STEP, STRIP_BYTES
from .jit import jit, pointer
from .kernels import _amax, _fp32_bits, _round, cast_region

# A unit of work for a thread: rows of blocks of one piece, about this many elements.
_ELEMENTS_PER_ITEM = 256 * 1024
# Chunks of items per thread: a thread that was held up leaves its share to the other.
_CHUNKS_PER_THREAD = 4
# FP32 bits of Inf, and of the smallest number that is Inf in BF16.
_INF, _ROUNDS_TO_INF = 0x7F800000, 0x7F7F8000
_BAD_SCALE, _NAN_CODE = np.uint8(BAD_SCALE), np.uint8(NAN_CODE)
_COPY, _SCALES, _CODES, _FP32 = (int(n) for n in (Kind.COPY, Kind.SCALES, Kind.CODES, Dtype.FP32))


class CpuTable:
    """A table with its work cut into items for threads.

    Args:
        pow2_scale, round_to_bf16: as in `cast_into`; copies take no notice of them.
    """

    def __init__(self, table: CastTable, *, pow2_scale: bool, round_to_bf16: bool) -> None:
        self.table = table
        self._items, self._scales_end = _items_of(table.pieces)
        sizes = (self._items[:, 2] - self._items[:, 1]) * table.pieces["cols"][self._items[:, 0]]
        self._until = np.cumsum(sizes)
        self._flags = np.zeros(table.flag_count, np.uint8)
        step = BF16_STEP if round_to_bf16 else NO_STEP
        self._run = partial(run_items, table.pieces, self._items)
        self._options = (np.int64(STRIP_BYTES), *step, *BF16_STEP, bool(pow2_scale))

    def run(self, addresses: Sequence[int], threads: int | None = None) -> np.ndarray:
        """Write every piece.

        Args:
            addresses: of the tensors that were sent, by position; they stay until this returns.
            threads: at most this many; default `torch.get_num_threads()`. The bytes do not depend
                on it.

        Returns:
            uint8 flags, overwritten by the next call: 1 where a block (cast) or row (copy) was not
            finite and kept its old bytes.
        """
        sources = np.asarray(addresses, np.int64)
        count, elements = len(self._items), int(self._until[-1]) if len(self._until) else 0
        run = partial(self._run, sources, self._flags, *self._options)
        run(0, self._scales_end)
        parts = min(threads or torch.get_num_threads(), 1 + elements // ELEMENTS_PER_THREAD, count)
        if parts <= 1:
            run(self._scales_end, count)
            return self._flags
        chunks = parts * _CHUNKS_PER_THREAD
        targets = np.arange(1, chunks) * elements / chunks
        inner = np.maximum(np.searchsorted(self._until, targets), self._scales_end)
        edges = [self._scales_end, *inner.tolist(), count]
        # A pool per call: one that is kept would hang in a forked child.
        with ThreadPoolExecutor(parts - 1) as pool:
            iterator = iter(list(pairwise(edges)))

            def work() -> None:
                for first, last in iterator:
                    run(first, last)

            others = [pool.submit(work) for _ in range(parts - 1)]
            work()
            for other in others:
                other.result()
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


@jit()
def copy_rows(
    source, source_stride, destination, destination_stride, nonfinite, cols, narrow, step,
    row_start, row_stop,
):  # fmt: skip
    """Copy rows that stay finite; `narrow` rounds FP32 to BF16 (nearest even)."""
    limit = np.uint32(_ROUNDS_TO_INF if narrow else _INF)
    for row in range(row_start, row_stop):
        x = source[row * source_stride : row * source_stride + cols]
        finite = _amax(x, np.uint32(0)) < limit
        nonfinite[row] = not finite
        if not finite:
            continue
        out = destination[row * destination_stride : row * destination_stride + cols]
        if narrow:
            for c in range(cols):
                bits = _round(_fp32_bits(x[c]), step[0], step[1], step[2])
                out[c] = out.dtype.type(bits >> np.uint32(16))
        else:
            for c in range(cols):
                out[c] = out.dtype.type(_fp32_bits(x[c]))


@jit()
def copy_scales(
    source, source_stride, destination, destination_stride, bad, cols, row_start, row_stop
):
    """Copy rows of FP32 bits that are all positive and finite."""
    for row in range(row_start, row_stop):
        x = source[row * source_stride : row * source_stride + cols]
        is_bad = False
        for c in range(cols):  # as unsigned, what is negative is above Inf; zero is not a scale
            is_bad |= x[c] >= np.uint32(0x7F800000) or x[c] == np.uint32(0)
        bad[row] = _BAD_SCALE if is_bad else np.uint8(0)
        if not is_bad:
            for c in range(cols):
                destination[row * destination_stride + c] = x[c]


@jit()
def copy_codes(source, source_stride, destination, destination_stride, bad, piece, start, stop):
    """Copy rows of codes whose scales were copied and none of which is NaN."""
    cols, block_n = piece["cols"], piece["block_n"]
    for row in range(start, stop):
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


@jit()
def run_items(
    pieces, items, addresses, flags, strip_bytes, half, odd, keep, half16, odd16, keep16,
    pow2_scale, first, last,
):  # fmt: skip
    """Items `first` to `last` of a table; releases the GIL."""
    step = (half16, odd16, keep16)
    for number in range(first, last):
        piece = pieces[items[number, 0]]
        rows, cols = piece["rows"], piece["cols"]
        address = addresses[piece["source"]] + piece["source_offset"]
        span = (rows - 1) * piece["source_stride"] + cols
        wide = numba.carray(pointer(address), (span,), np.uint32)
        slim = numba.carray(pointer(address), (span,), np.uint16)
        out_span = (rows - 1) * piece["destination_stride"] + cols
        is_wide = piece["source_dtype"] == _FP32
        start, stop = items[number, 1], items[number, 2]
        strides = (piece["source_stride"], piece["destination_stride"])
        if piece["kind"] == _SCALES:
            out32 = numba.carray(pointer(piece["destination"]), (out_span,), np.uint32)
            bad = flags[piece["flags"] : piece["flags"] + rows]
            copy_scales(wide, strides[0], out32, strides[1], bad, cols, start, stop)
            continue
        if piece["kind"] == _CODES:
            sent = numba.carray(pointer(address), (span,), np.uint8)
            out8 = numba.carray(pointer(piece["destination"]), (out_span,), np.uint8)
            bad = flags[piece["flags"] :]
            copy_codes(sent, strides[0], out8, strides[1], bad, piece, start, stop)
            continue
        if piece["kind"] == _COPY:
            out32 = numba.carray(pointer(piece["destination"]), (out_span,), np.uint32)
            out16 = numba.carray(pointer(piece["destination"]), (out_span,), np.uint16)
            to_wide = piece["destination_dtype"] == _FP32
            bad = flags[piece["flags"] : piece["flags"] + rows]
            if is_wide and to_wide:
                copy_rows(wide, strides[0], out32, strides[1], bad, cols, False, step, start, stop)
            elif is_wide:
                copy_rows(wide, strides[0], out16, strides[1], bad, cols, True, step, start, stop)
            elif to_wide:
                copy_rows(slim, strides[0], out32, strides[1], bad, cols, False, step, start, stop)
            else:
                copy_rows(slim, strides[0], out16, strides[1], bad, cols, True, step, start, stop)
            continue
        cast_region(
            address, is_wide, strides[0], piece["destination"], strides[1], piece["scales"],
            piece["scales_stride0"], piece["scales_stride1"], flags.ctypes.data + piece["flags"],
            rows, cols, piece["block_n"], piece["block_k"], strip_bytes, half, odd, keep,
            pow2_scale, start, stop,
        )  # fmt: skip


def warmup() -> None:
    """Compile (or load from the disk cache) the kernel, so that no request pays for it."""
    CpuTable(CastTable(np.zeros(0, PIECE), 0, ()), pow2_scale=False, round_to_bf16=True).run([])
