"""The arithmetic of the packed GPU kernels, tried on a CPU: every amax, every value below it.

    python tools/packed_quotient.py    # all of them: 2 × 532,701,119 pairs, half a minute

What remains to be believed is that the hardware's conversion to e4m3 rounds to nearest even and
saturates, as its manual says.
"""

from __future__ import annotations

import time

import numba
import numpy as np

from sglang_fp8rl.numerics.cpu.jit import fma

INF = 0x7F80  # BF16 bits; below it are the finite magnitudes
ALL_PAIRS = 532_701_119


@numba.njit
def fp32(bits):
    return np.uint32(bits).view(np.float32)


@numba.njit
def bits_of(x):
    return np.float32(x).view(np.uint32)


@numba.njit
def encode(y):
    """e4m3 of FP32: nearest even, saturating."""
    bits = bits_of(y)
    magnitude = min(np.uint32(bits & np.uint32(0x7FFFFFFF)), np.uint32(0x43E00000))
    exponent = max(np.uint32(magnitude & np.uint32(0x7F800000)), np.uint32(0x3C800000))
    lift = np.uint32(exponent + np.uint32(20 << 23))
    ulps = np.uint32(bits_of(fp32(magnitude) + fp32(lift)) - lift)
    code = np.uint32(ulps + np.uint32(np.uint32(exponent - np.uint32(0x3C800000)) >> np.uint32(20)))
    return np.uint32(code | np.uint32(np.uint32(bits >> np.uint32(24)) & np.uint32(0x80)))


@numba.njit
def scale_inv(amax, pow2_scale):
    scale = max(fp32(amax << 16) / np.float32(448.0), np.float32(2.0**-126))
    if pow2_scale:
        scale = fp32(np.uint32(bits_of(scale) + np.uint32(0x007FFFFF)) & np.uint32(0x7F800000))
    return scale


@numba.njit
def reciprocal(scale):
    """(near, rest), as `arithmetic.reciprocal`."""
    one = np.float32(1.0)
    near = np.float32(one / scale)
    if fma(np.float32(-scale), near, one) < 0:
        near = fp32(bits_of(near) - np.uint32(1))
    return near, np.float32(fma(np.float32(-scale), near, one) * near)


@numba.njit(nogil=True)
def wrong_codes(amaxes, pow2_scale):
    """(pairs tried, wrong ones) over magnitudes of amax (BF16 bits), with both signs of each value."""
    pairs, wrong = 0, 0
    for amax in amaxes:
        scale = scale_inv(np.uint32(amax), pow2_scale)
        near, rest = reciprocal(scale)
        for value in range(np.uint32(amax) + np.uint32(1)):
            x = fp32(np.uint32(value) << np.uint32(16))
            y = np.float32(-x)
            wrong += encode(fma(x, near, np.float32(x * rest))) != encode(np.float32(x / scale))
            wrong += encode(fma(y, near, np.float32(y * rest))) != encode(np.float32(y / scale))
        pairs += amax + 1
    return pairs, wrong


def main() -> None:
    for pow2_scale in (False, True):
        began = time.perf_counter()
        pairs, wrong = wrong_codes(np.arange(1, INF), pow2_scale)
        took = time.perf_counter() - began
        print(f"pow2_scale={pow2_scale}: {pairs:,} pairs, {wrong} wrong codes, {took:.0f} s")
        if wrong or pairs != ALL_PAIRS:
            raise SystemExit(1)


if __name__ == "__main__":
    main()
