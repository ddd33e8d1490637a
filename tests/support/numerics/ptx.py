"""Runs the few PTX instructions of the packed kernels on arrays: what a GPU would compute, without one."""

from __future__ import annotations

import re
from typing import Any

import numba
import numpy as np
import torch

from sglang_fp8rl.numerics.cpu.jit import fma

_LINE = re.compile(r"([a-z][\w.]*)\s+(.+?);")
Registers = dict[str, np.ndarray]


@numba.njit
def _fma(a, b, c):
    out = np.empty_like(a)
    for i in range(len(a)):
        out[i] = fma(a[i], b[i], c[i])
    return out


def _f32(x: np.ndarray) -> np.ndarray:
    return x.astype(np.uint32).view(np.float32)


def _bits(x: np.ndarray) -> np.ndarray:
    return x.astype(np.float32).view(np.uint32)


def _as(x: np.ndarray, dtype: torch.dtype, bits: torch.dtype) -> np.ndarray:
    """Bits of FP32 numbers in another dtype, nearest even."""
    return torch.from_numpy(np.ascontiguousarray(x)).to(dtype).view(bits).numpy().astype(
        np.uint32
    ) & ((1 << 8 * dtype.itemsize) - 1)


def _from(x: np.ndarray, bits: Any, view: torch.dtype) -> np.ndarray:
    return torch.from_numpy(x.astype(bits)).view(view).float().numpy()


def _e4m3(x: np.ndarray) -> np.ndarray:
    return _as(np.clip(x, -448, 448), torch.float8_e4m3fn, torch.uint8)


def _unpacked(codes: np.ndarray) -> np.ndarray:
    halves = [
        _from(one, np.uint8, torch.float8_e4m3fn) for one in (codes & 0xFF, codes >> 8 & 0xFF)
    ]
    low, high = (_as(half, torch.float16, torch.int16) for half in halves)
    return low | high << 16


# A packed result has its first operand in the upper half.
_OPERATIONS = {
    "shl.b32": lambda a, b: a << b,
    "and.b32": lambda a, b: a & b,
    "mul.rn.f32": lambda a, b: _bits(_f32(a) * _f32(b)),
    "fma.rn.f32": lambda a, b, c: _bits(_fma(_f32(a), _f32(b), _f32(c))),
    "cvt.rn.satfinite.e4m3x2.f32": lambda a, b: _e4m3(_f32(a)) << 8 | _e4m3(_f32(b)),
    "cvt.rn.f16x2.e4m3x2": _unpacked,
    "cvt.f32.f16": lambda a: _bits(_from(a, np.uint16, torch.float16)),
    "cvt.rn.bf16x2.f32": lambda a, b: (
        _as(_f32(a), torch.bfloat16, torch.int16) << 16 | _as(_f32(b), torch.bfloat16, torch.int16)
    ),
    "setp.ne.b32": lambda a, b: (a != b).astype(np.uint32),
    "selp.b32": lambda a, b, chosen: np.where(chosen != 0, a, b),
}


def run(text: str, registers: Registers) -> Registers:
    """Execute instructions, one a line; an operation that is not known raises `KeyError`."""
    size = len(next(iter(registers.values())))

    def value(operand: str) -> np.ndarray:
        if operand in registers:
            return registers[operand]
        return np.full(size, int(operand, 0), np.uint32)

    for line in text.splitlines():
        found = _LINE.match(line.strip())
        if found is None:
            continue
        operation, operands = found[1], re.split(r",\s*(?![^{]*})", found[2])
        to, *sources = operands
        if operation == "mov.b32" and to.startswith("{"):
            low, high = to.strip("{} ").split(", ")
            registers[low], registers[high] = value(sources[0]) & 0xFFFF, value(sources[0]) >> 16
        elif operation == "mov.b32":
            low, high = sources[0].strip("{} ").split(", ")
            registers[to] = value(low) & 0xFFFF | value(high) << 16
        else:
            with np.errstate(all="ignore"):
                registers[to] = _OPERATIONS[operation](*map(value, sources)).astype(np.uint32)
    return registers
