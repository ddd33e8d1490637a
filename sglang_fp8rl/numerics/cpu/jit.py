"""How CPU kernels are compiled, and LLVM instructions that Numba has no name for."""

# Numba reads these functions, not their annotations.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import numba
from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic, overload
from numba.np.numpy_support import as_dtype


def jit(fastmath: Collection[str] = ()) -> Callable[[Callable], Any]:
    """`njit`, cached on disk where that is possible: servers start often, on read-only images too.

    Args:
        fastmath: what LLVM may do with floating-point sums; nothing, unless a kernel's result is no
            byte of a weight.
    """
    options = {"nogil": True, "fastmath": set(fastmath) or False, "error_model": "numpy"}

    def compiled(function: Callable) -> Any:
        try:
            return numba.njit(cache=True, **options)(function)
        except RuntimeError:  # "cannot cache function: no locator available"
            return numba.njit(**options)(function)

    return compiled


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
