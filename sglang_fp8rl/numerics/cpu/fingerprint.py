"""The fingerprint of `numerics/fingerprint.py` on a CPU: one read of the bytes, nothing allocated."""

# Numba reads these functions, not their annotations.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import numba
import numpy as np
import torch

from ..fingerprint import keys
from .jit import jit, pointer
from .threads import by_rows

_EIGHT = np.uint64(8)


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
        here = address + first * stride
        return int(
            rows_number(
                here, stride, nbytes, in_words, first_byte, row_keys[first:end], column_keys
            )
        )

    return sum(by_rows(work, rows, nbytes // 2, 1, threads))


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
