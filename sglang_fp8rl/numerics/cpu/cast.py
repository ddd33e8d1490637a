"""The CPU cast through Numba; it allocates nothing the size of a tensor.

Importing this module imports Numba (about half a second); `cast.py` does so on first use.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import pairwise

import numpy as np
import torch

from ..grid import Blockwise, ScaleGranularity, ceil_div
from .kernels import cast_region

# Below this, starting a thread costs more than it saves.
ELEMENTS_PER_THREAD = 2 * 1024 * 1024
# Of a source that has to be copied first (transposed, FP16), this much at a time, or one block.
SCRATCH_ELEMENTS = 256 * 1024
# Of each row, between the two passes. Times 128 rows it has to stay in the L2 cache.
STRIP_BYTES = 4096
# Constants of the rounding to BF16: half an ulp less one, the bit that breaks ties, bits to keep.
BF16_STEP = tuple(map(np.uint32, (0x7FFF, 1, 0xFFFF0000)))
NO_STEP = tuple(map(np.uint32, (0, 0, 0xFFFFFFFF)))


def cast_into(
    source: torch.Tensor,
    qweight: torch.Tensor,
    weight_scale: torch.Tensor,
    granularity: ScaleGranularity,
    pow2_scale: bool,
    round_to_bf16: bool,
    threads: int | None = None,
) -> torch.Tensor:
    """Cast a checked [N, K] source into codes [N, K] and scales of the granularity's shape.

    Args:
        threads: at most this many; default `torch.get_num_threads()` for large tensors. The bytes
            do not depend on it.

    Returns:
        bool of that shape, True where a block is not finite and was left alone.
    """
    nonfinite = torch.empty(weight_scale.shape, dtype=torch.bool, device="cpu")
    block_n, block_k = block_size = granularity.block(source.shape)
    rounding = (pow2_scale, round_to_bf16)
    if source.stride(1) == 1 and source.dtype != torch.float16:
        _cast_view(source, qweight, weight_scale, nonfinite, block_size, *rounding, threads)
        return nonfinite
    source = source.detach()
    dtype = torch.float32 if source.dtype == torch.float16 else source.dtype
    for rows, cols in _chunks(tuple(source.shape), block_size):
        scratch = source[rows, cols].to(dtype, memory_format=torch.contiguous_format, copy=True)
        blocks = (
            slice(rows.start // block_n, ceil_div(rows.stop, block_n)),
            slice(cols.start // block_k, ceil_div(cols.stop, block_k)),
        )
        flags = nonfinite[blocks].contiguous()
        codes, scales = qweight[rows, cols], weight_scale[blocks]
        _cast_view(scratch, codes, scales, flags, block_size, *rounding, threads=1)
        nonfinite[blocks] = flags
    return nonfinite


def warmup() -> None:
    """Compile (or load from the disk cache) both kernels, so that no request pays for it."""
    # A host builds models under a default dtype and device of its own.
    scale = torch.empty(1, 1, dtype=torch.float32, device="cpu")
    for dtype in (torch.float32, torch.bfloat16):
        source = torch.ones(1, 1, dtype=dtype, device="cpu")
        codes = torch.empty(1, 1, dtype=torch.float8_e4m3fn, device="cpu")
        cast_into(source, codes, scale, Blockwise(), False, True)


def _cast_view(
    source: torch.Tensor,
    qweight: torch.Tensor,
    scales: torch.Tensor,
    nonfinite: torch.Tensor,
    block_size: tuple[int, int],
    pow2_scale: bool,
    round_to_bf16: bool,
    threads: int | None,
) -> None:
    """The kernel on a source whose rows are contiguous, split over threads by rows of blocks."""
    rows, cols = source.shape
    block_n, block_k = block_size
    # Addresses, because arrays cost a small tensor more than its cast: each is three calls here.
    cast_rows = partial(
        cast_region,
        source.data_ptr(),
        source.dtype == torch.float32,
        source.stride(0),
        qweight.data_ptr(),
        qweight.stride(0),
        scales.data_ptr(),
        *scales.stride(),
        nonfinite.data_ptr(),
        rows,
        cols,
        block_n,
        block_k,
        STRIP_BYTES,
        *(BF16_STEP if round_to_bf16 else NO_STEP),
        bool(pow2_scale),
    )
    by_rows(cast_rows, rows, cols, block_n, threads)


def by_rows(
    run: Callable[[int, int], None], rows: int, cols: int, block_n: int, threads: int | None
) -> None:
    """Run a kernel of `(first row, row behind the last)` over all rows, in threads if they are many."""
    parts = 1 + rows * cols // ELEMENTS_PER_THREAD
    if parts > 1:
        block_rows = ceil_div(rows, block_n)
        parts = min(threads or torch.get_num_threads(), parts, block_rows)
    if parts <= 1:
        run(0, rows)
        return
    edges = [min(rows, block_n * (block_rows * i // parts)) for i in range(parts)] + [rows]
    # A pool per call: one that is kept would hang in a forked child.
    with ThreadPoolExecutor(parts - 1) as pool:
        others = [pool.submit(run, a, b) for a, b in pairwise(edges[1:])]
        run(edges[0], edges[1])
        for other in others:
            other.result()


def _chunks(shape: tuple[int, ...], block_size: tuple[int, int]) -> Iterator[tuple[slice, slice]]:
    """Regions of whole blocks that cover `shape`, each of SCRATCH_ELEMENTS or a single block."""
    rows, cols = shape
    block_n, block_k = block_size
    width = min(cols, block_k * max(1, SCRATCH_ELEMENTS // (block_n * block_k)))
    height = block_n * max(1, SCRATCH_ELEMENTS // (block_n * width))
    for r in range(0, rows, height):
        for c in range(0, cols, width):
            yield slice(r, min(r + height, rows)), slice(c, min(c + width, cols))
