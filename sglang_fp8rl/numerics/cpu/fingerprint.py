"""The fingerprint of `numerics/fingerprint.py` on a CPU: one read of the bytes, nothing allocated."""

from __future__ import annotations

import numpy as np
import torch

from ..fingerprint import keys
from .jit import array_at, by_rows, jit
from .kernels import SLIM


def matrix_number(
    matrix: torch.Tensor, row: int, first_byte: int, seed: int, column_keys: np.ndarray
) -> int:
    """As `by_torch`, of a matrix of words."""
    (rows, words), size = matrix.shape, matrix.element_size()
    stride, address = matrix.stride(0) * size, matrix.data_ptr()
    row_keys, word_keys = keys(seed, row, rows), column_keys[first_byte // size :]

    def work(first: int, end: int) -> int:
        here = address + first * stride
        return int(rows_number(here, stride, words, row_keys[first:end], word_keys))

    return sum(by_rows(work, rows, words, 1))


@jit
def rows_number(address, stride, words, row_keys, word_keys):
    """Of each row the sum over its words, times the row's key; releases the GIL."""
    total = np.uint64(0)
    for row in range(len(row_keys)):
        total_of_row = np.uint64(0)
        row_words = array_at(address + row * stride, words, SLIM)
        for word in range(words):
            total_of_row += np.uint64(row_words[word]) * word_keys[word]
        total += total_of_row * row_keys[row]
    return total
