"""Kernels that release the GIL, in as many threads as the work is worth."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import TypeVar

import torch

from ..grid import ceil_div

T = TypeVar("T")

# Elements (of a fingerprint: words). Below this, starting a thread costs more than it saves.
WORTH_A_THREAD = 2 * 1024 * 1024


def threads_for(elements: int, threads: int | None) -> int:
    """How many are worth it, up to `threads`, by default `torch.get_num_threads()`."""
    return min(threads or torch.get_num_threads(), 1 + elements // WORTH_A_THREAD)


def by_rows(
    work: Callable[[int, int], T], rows: int, cols: int, block_n: int, threads: int | None
) -> list[T]:
    """What `work(first row, row behind the last)` returns, over all rows, cut between rows of blocks."""
    block_rows = ceil_div(rows, block_n)
    count = min(threads_for(rows * cols, threads), block_rows)
    if count == 1:
        return [work(0, rows)]
    edges = [min(rows, block_n * (block_rows * part // count)) for part in range(count + 1)]
    return in_threads(work, edges, count)


def in_threads(work: Callable[[int, int], T], edges: Sequence[int], threads: int) -> list[T]:
    """What `work` returns of each two neighbouring edges; a thread that is done takes the next two."""
    spans = iter(list(pairwise(edges)))  # its `next` is one step for the GIL

    def run() -> list[T]:
        return [work(*span) for span in spans]

    if threads <= 1:
        return run()
    # A pool per call: one that is kept would hang in a forked child.
    with ThreadPoolExecutor(threads - 1) as pool:
        others = [pool.submit(run) for _ in range(threads - 1)]
        return run() + [one for other in others for one in other.result()]
