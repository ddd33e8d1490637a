"""How CPU kernels are compiled."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import numba


def jit(fastmath: Collection[str] = ()) -> Callable[[Callable], Any]:
    """`njit`, cached on disk where that is possible: servers start often, on read-only images too.

    Args:
        fastmath: what LLVM may do with floating-point sums; nothing, unless a kernel's result is no
            byte of a weight.
    """
    options = {
        "nogil": True,
        "fastmath": set(fastmath) or False,
        "error_model": "numpy",
        "boundscheck": False,
    }

    def compiled(function: Callable) -> Any:
        try:
            return numba.njit(cache=True, **options)(function)
        except RuntimeError:  # "cannot cache function: no locator available"
            return numba.njit(**options)(function)

    return compiled
