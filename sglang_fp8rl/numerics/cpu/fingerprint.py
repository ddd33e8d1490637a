"""The fingerprint of `numerics/fingerprint.py` on a CPU: one read of the bytes, nothing allocated."""

# Numba reads these functions, not their annotations.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import numba
import numpy as np
import torch

from ..fingerprint import keys
from .jit import jit, pointer

# Below this, starting a thread costs more than it saves.
_BYTES_PER_THREAD = 4 * 1024 * 1024
_EIGHT = np.uint64(8)


def reads(matrix: torch.Tensor, first_byte: int) -> bool:
    """Whether this kernel takes it: any."""
    return True


def matrix_number(
    matrix: torch.Tensor,
    row: int,
    first_byte: int,
    seed: int,
    column_keys: np.ndarray,
    threads: int | None = None,
) -> int:
    """The sum over a matrix whose rows are contiguous.

    Args:
        row, first_byte: where it starts in the full tensor.
        threads: at most this many; default `torch.get_num_threads()`.
    """
    rows, nbytes = matrix.shape[0], matrix.shape[1] * matrix.element_size()
    stride = matrix.stride(0) * matrix.element_size()
    address = matrix.data_ptr()
    in_words = not (first_byte | address | (stride if rows > 1 else 0)) & 1
    row_keys = keys(seed, row, rows)

    def work(first: int, end: int) -> int:
        return rows_number(
            address + first * stride, stride, nbytes, in_words, first_byte, row_keys[first:end],
            column_keys,
        )  # fmt: skip

    parts = 1 + rows * nbytes // _BYTES_PER_THREAD
    parts = min(threads or torch.get_num_threads(), parts, rows)
    if parts <= 1:
        return int(work(0, rows))
    edges = [rows * part // parts for part in range(parts + 1)]
    # A pool per call: one that is kept would hang in a forked child.
    with ThreadPoolExecutor(parts - 1) as pool:
        others = [pool.submit(work, *pair) for pair in pairwise(edges[1:])]
        return int(work(edges[0], edges[1])) + sum(int(other.result()) for other in others)


@jit()
def rows_number(address, stride, nbytes, in_words, first_byte, row_keys, column_keys):
    """Of each row the sum over its words, times the row's key; releases the GIL."""
    total = np.uint64(0)
    words = nbytes // 2
    for row in range(len(row_keys)):
        at = address + row * stride
        total_of_row = np.uint64(0)
        if in_words:
            row_words = numba.carray(pointer(at), (words,), np.uint16)
            word_keys = column_keys[first_byte // 2 : first_byte // 2 + words]
            for word in range(words):
                total_of_row += np.uint64(row_words[word]) * word_keys[word]
            if nbytes % 2:
                last = numba.carray(pointer(at), (nbytes,), np.uint8)[nbytes - 1]
                total_of_row += np.uint64(last) * column_keys[first_byte // 2 + words]
        else:
            row_bytes = numba.carray(pointer(at), (nbytes,), np.uint8)
            for byte in range(nbytes):
                place = first_byte + byte
                value = np.uint64(row_bytes[byte]) << (_EIGHT * np.uint64(place & 1))
                total_of_row += value * column_keys[place >> 1]
        total += total_of_row * row_keys[row]
    return total
