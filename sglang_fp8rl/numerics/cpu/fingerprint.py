"""The fingerprint of `numerics/fingerprint.py` on a CPU: one read of the bytes, nothing allocated."""

# Numba reads these functions, not their annotations.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import numpy as np
import torch

from ..fingerprint import by_torch, keys
from .jit import array_at, jit
from .kernels import CODE, SLIM
from .threads import by_rows


def matrix_number(
    matrix: torch.Tensor,
    row: int,
    first_byte: int,
    seed: int,
    column_keys: np.ndarray,
    threads: int | None = None,
) -> int:
    """The sum over a matrix whose rows are contiguous; one at odd places is left to torch.

    Args:
        row, first_byte: where it starts in the full tensor.
        threads: at most this many; default `torch.get_num_threads()`.
    """
    rows, nbytes = matrix.shape[0], matrix.shape[1] * matrix.element_size()
    stride = matrix.stride(0) * matrix.element_size()
    address = matrix.data_ptr()
    if (first_byte | address | (stride if rows > 1 else 0)) % 2:
        return by_torch(matrix, row, first_byte, seed, column_keys)
    row_keys, word_keys = keys(seed, row, rows), column_keys[first_byte // 2 :]

    def work(first: int, end: int) -> int:
        here = address + first * stride
        return int(rows_number(here, stride, nbytes, row_keys[first:end], word_keys))

    return sum(by_rows(work, rows, nbytes // 2, 1, threads))


@jit()
def rows_number(address, stride, nbytes, row_keys, word_keys):
    """Of each row the sum over its words, times the row's key; releases the GIL."""
    total = np.uint64(0)
    words = nbytes // 2
    for row in range(len(row_keys)):
        at = address + row * stride
        total_of_row = np.uint64(0)
        row_words = array_at(at, words, SLIM)
        for word in range(words):
            total_of_row += np.uint64(row_words[word]) * word_keys[word]
        if nbytes % 2:
            total_of_row += np.uint64(array_at(at, nbytes, CODE)[nbytes - 1]) * word_keys[words]
        total += total_of_row * row_keys[row]
    return total
