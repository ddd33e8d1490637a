"""How CPU kernels are compiled, and run in as many threads as the work is worth; and LLVM instructions that
Numba has no name for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar
from zlib import crc32

import numba
import torch
from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic, overload
from numba.np.numpy_support import as_dtype

from ...formats.format import ceil_div

T = TypeVar("T")

# Elements (of a fingerprint: words). Below this, starting a thread costs more than it saves.
WORTH_A_THREAD = 2 * 1024 * 1024
# Of all files that a kernel may take in functions and constants of.
_SOURCES = [crc32(path.read_bytes()) for path in sorted(Path(__file__).parents[1].rglob("*.py"))]


def jit(function: Callable) -> Any:
    """`njit` without the GIL, cached on disk where that is possible: servers start often, on read-only images too."""
    options = {"nogil": True, "error_model": "numpy"}
    try:
        compiled: Any = numba.njit(cache=True, **options)(function)
    except RuntimeError:  # "cannot cache function: no locator available"
        return numba.njit(**options)(function)
    compiled._cache._cache_file._source_stamp = _SOURCES  # Numba's is of the function's own file
    return compiled


def threads_for(elements: int) -> int:
    """How many are worth it, up to torch's."""
    return min(torch.get_num_threads(), 1 + elements // WORTH_A_THREAD)


def by_rows(work: Callable[[int, int], T], rows: int, cols: int, block_n: int) -> list[T]:
    """What `work(first row, row behind the last)` returns, over all rows, cut between rows of blocks."""
    block_rows = ceil_div(rows, block_n)
    count = min(threads_for(rows * cols), block_rows)
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


@intrinsic
def fma(typing_context, a, b, c):
    """FP32 `a * b + c` with one rounding."""

    def codegen(context, builder, signature, arguments):
        return builder.fma(*arguments)

    return types.float32(types.float32, types.float32, types.float32), codegen


@intrinsic
def pointer(typing_context, address):
    """An address as a pointer, for `numba.carray`."""

    def codegen(context, builder, signature, arguments):
        return builder.inttoptr(arguments[0], cgutils.voidptr_t)

    return types.voidptr(types.int64), codegen


def array_at(address, size, unit):
    """The memory at an address as an array [size] of elements of the type that the number `unit` has."""


@overload(array_at)
def _overload_array_at(address, size, unit):
    dtype = as_dtype(unit).type
    return lambda address, size, unit: numba.carray(pointer(address), (size,), dtype)


@intrinsic
def prefetch(typing_context, address):
    """Ask for the cache line at an address; where nothing is mapped, nothing happens."""

    def codegen(context, builder, signature, arguments):
        where = builder.inttoptr(arguments[0], cgutils.voidptr_t)
        kind = ir.FunctionType(ir.VoidType(), [cgutils.voidptr_t, *[ir.IntType(32)] * 3])
        instruction = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0i8")
        to_read, into_l2, data = (ir.Constant(ir.IntType(32), n) for n in (0, 2, 1))
        builder.call(instruction, [where, to_read, into_l2, data])
        return context.get_dummy_value()

    return types.void(types.int64), codegen
