"""The cast in exact rational arithmetic: slow, and sharing neither code nor tricks with the package.

Every floating-point step is "the exact rational result, rounded to nearest even in a format", with
one generic rounding for FP32, BF16 and e4m3.
"""

from fractions import Fraction

import torch

FP32 = (24, -126)  # significand bits, smallest normal exponent
BF16 = (8, -126)
E4M3 = (4, -6)


def round_to_nearest_even(value: Fraction, significand_bits: int, min_exponent: int) -> Fraction:
    """`value` in a binary format without an upper end, subnormals included."""
    if value == 0:
        return Fraction(0)
    sign, value = (-1, -value) if value < 0 else (1, value)
    exponent = value.numerator.bit_length() - value.denominator.bit_length()
    while Fraction(2) ** exponent > value:
        exponent -= 1
    while Fraction(2) ** (exponent + 1) <= value:
        exponent += 1
    ulp = Fraction(2) ** (max(exponent, min_exponent) - significand_bits + 1)
    count, rest = divmod(value, ulp)
    if rest * 2 > ulp or (rest * 2 == ulp and count % 2 == 1):
        count += 1
    return sign * count * ulp


def decode_e4m3(code: int) -> Fraction | None:
    """Value of one e4m3fn byte; None for NaN. From the OCP 8-bit floating point specification."""
    exponent, mantissa = code >> 3 & 15, code & 7
    if exponent == 15 and mantissa == 7:
        return None
    magnitude = (
        Fraction(mantissa, 8) * Fraction(2) ** -6
        if exponent == 0
        else (1 + Fraction(mantissa, 8)) * Fraction(2) ** (exponent - 7)
    )
    return -magnitude if code & 128 else magnitude


CODE_OF = {decode_e4m3(code): code for code in range(127)}  # magnitudes


def quantize_block(
    block: list[float], *, pow2_scale: bool = False, round_to_bf16: bool = True
) -> tuple[list[int], Fraction]:
    """Codes and stored scale of the finite values of one block. Signs of zeros count."""
    exact = [Fraction(v) for v in block]
    if round_to_bf16:
        exact = [round_to_nearest_even(v, *BF16) for v in exact]
    amax = max(abs(v) for v in exact)
    scale = max(round_to_nearest_even(amax / 448, *FP32), Fraction(2) ** -126)
    if amax == 0:
        scale = Fraction(1)
    if pow2_scale:
        power = Fraction(2) ** -126
        while power < scale:
            power *= 2
        scale = power
    codes = []
    for value, original in zip(exact, block, strict=True):
        y = round_to_nearest_even(abs(value) / scale, *FP32)
        code = CODE_OF[min(round_to_nearest_even(min(y, Fraction(448)), *E4M3), Fraction(448))]
        negative = original < 0 or str(original).startswith("-")
        codes.append(code | (128 if negative else 0))
    return codes, scale


_CODES = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).double()
E4M3_GRID = _CODES[_CODES.isfinite()].unique()  # every number, ascending


def nearest_e4m3(x: torch.Tensor) -> torch.Tensor:
    """By search among all numbers of e4m3, in FP64; ties to the even code, and no more than the largest."""
    x = x.double().clamp(-448, 448)
    upper = torch.searchsorted(E4M3_GRID, x).clamp(1, len(E4M3_GRID) - 1)
    low, high = E4M3_GRID[upper - 1], E4M3_GRID[upper]
    is_odd = (upper - 1 - len(E4M3_GRID) // 2) % 2 == 1  # the lower one's code
    is_high = (high - x < x - low) | ((high - x == x - low) & is_odd)
    return torch.where(is_high, high, low)
