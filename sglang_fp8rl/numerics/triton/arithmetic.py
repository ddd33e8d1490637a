"""What the GPU kernels compute: twice, in integers and on packed words, with the same bytes.

*In integers*, because Triton's interpreter truncates FP32→BF16 and rounds FP8 casts otherwise than
hardware does: a kernel that casts could not be checked without a GPU. Likewise `div_rn`, because
Triton's `/` is approximate, and an integer maximum, because `tl.maximum` drops NaN. It also serves
sources that are not rounded to BF16, and GPUs that have no conversion to e4m3 (older than sm_89).

*On packed words*, because an IEEE division and an encoding in integers are 27 instructions per
element, and a copy leaves time for about 20: two BF16 values to a register, a product with a
reciprocal in two parts instead of the division, and the hardware's conversion. That it gives the
code of the quotient is tried for every BF16 amax and every BF16 value below it, see
`tests/unit/numerics/test_packed_quotient.py`.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl

from ..write_table import DTYPES


class Constant(tl.constexpr):
    """A number or text of kernels, which is no other one later. Triton asks for that at each launch, which with `constexpr`
    took a quarter of a launch's time on the host."""

    def __deepcopy__(self, memo: Any) -> Constant:
        return self

    def __ne__(self, other: Any) -> Any:
        return False if other is self else super().__ne__(other)


# Kinds of source and of copies, as of `write_table`: FP32 comes as int32, BF16 and FP16 as int16.
FP32, BF16, FP16 = (Constant(DTYPES[one]) for one in (torch.float32, torch.bfloat16, torch.float16))
# The first with a conversion to e4m3 (Ada); it also has the maximum of two BF16 at once.
_CONVERTS_TO_E4M3 = (8, 9)


@functools.cache
def has_packed_kernels(device: torch.device) -> bool:
    """Whether kernels may use the instructions of `packed_*`; not in the interpreter."""
    if device.type != "cuda" or torch.version.hip is not None:
        return False
    return torch.cuda.get_device_capability(device) >= _CONVERTS_TO_E4M3


def on_device(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """A copy that nothing waits for."""
    tensor = torch.from_numpy(array)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


@triton.jit
def fp32_bits(x, KIND: tl.constexpr):
    """FP32 bits (int32) of source bits."""
    if KIND == FP32:
        bits = x
    elif KIND == BF16:
        bits = x.to(tl.int32) << 16
    else:
        bits = x.to(tl.float16, bitcast=True).to(tl.float32).to(tl.int32, bitcast=True)
    return bits


@triton.jit
def round_bits_to_bf16(bits):
    """Round to nearest even on FP32 bits; the magnitude may carry into Inf, as it should."""
    return (bits + 0x7FFF + ((bits >> 16) & 1)) & -65536


@triton.jit
def amax_to_scale_inv(amax, POW2: tl.constexpr, ROUND: tl.constexpr):
    """Bits of an amax, rounded here if `ROUND`, to (scale FP32, finite int1), as in `reference.py`."""
    finite = amax < 0x7F800000
    if ROUND:
        amax = tl.where(finite, round_bits_to_bf16(amax), amax)  # a NaN would wrap around
        finite = amax < 0x7F800000
    scale = tl.math.div_rn(amax.to(tl.float32, bitcast=True), 448.0)
    # Positive floats sort like their bits, so the floor at the smallest normal is an integer max.
    bits = tl.maximum(scale.to(tl.int32, bitcast=True), 0x00800000)
    if POW2:
        bits = (bits + 0x007FFFFF) & 0x7F800000
    bits = tl.where(amax == 0, 0x3F800000, bits)
    return bits.to(tl.float32, bitcast=True), finite


@triton.jit
def lifted_quotient(bits, scale):
    """|FP32 `bits` / `scale`|, 448 at most, plus 2**(e+20) of its exponent e; and the bits of the latter.

    The sum has no bit below the e4m3 ulp, as in `cpu.kernels._code`.
    """
    y = tl.math.div_rn(bits.to(tl.float32, bitcast=True), scale).to(tl.int32, bitcast=True)
    a = tl.minimum(y & 0x7FFFFFFF, 0x43E00000)  # 448.0
    lift = tl.maximum(a & 0x7F800000, 0x3C800000) + (20 << 23)  # e is at least -6
    return a.to(tl.float32, bitcast=True) + lift.to(tl.float32, bitcast=True), lift


@triton.jit
def packed_bf16(x, KIND: tl.constexpr):
    """Source bits to BF16 bits (int16), rounded by the hardware; registers hold two each."""
    if KIND == BF16:
        rounded = x
    else:
        rounded = tl.inline_asm_elementwise(
            "cvt.rn.bf16x2.f32 $0, $2, $1;",
            "=r,r,r",
            [fp32_bits(x, KIND)],
            dtype=tl.int16,
            is_pure=True,
            pack=2,
        )
    return rounded


@triton.jit
def _larger_of_pairs(a, b):
    """Of two words of two BF16 each, the larger magnitudes; NaN wins, the signs mean nothing."""
    return tl.inline_asm_elementwise(
        "max.NaN.xorsign.abs.bf16x2 $0, $1, $2;",
        "=r,r,r",
        [a, b],
        dtype=tl.int32,
        is_pure=True,
        pack=1,
    )


@triton.jit
def packed_largest_magnitude(x):
    """FP32 bits of the largest |x| of BF16 bits, two at a time; NaN is above Inf, above numbers."""
    low, high = tl.split(tl.reshape(x, [x.numel // 2, 2]))
    words = tl.inline_asm_elementwise(
        "mov.b32 $0, {$1, $2};", "=r,h,h", [low, high], dtype=tl.int32, is_pure=True, pack=1
    )
    pair = tl.reduce(words, 0, _larger_of_pairs)
    return tl.maximum(pair & 0x7FFF, (pair >> 16) & 0x7FFF) << 16


@triton.jit
def reciprocal(scale):
    """`(near, rest)`: the reciprocal and what is missing of it. `near` is never above it, so that a product that vanishes
    keeps its sign."""
    near = tl.math.div_rn(1.0, scale)
    below = (near.to(tl.int32, bitcast=True) - 1).to(tl.float32, bitcast=True)
    near = tl.where(tl.fma(-scale, near, 1.0) < 0, below, near)
    return near, tl.fma(-scale, near, 1.0) * near


# Of a word of two BF16, the quotients: `x * near + x * rest`, but for one rounding.
_QUOTIENTS = """
    shl.b32 {first}, {word}, 16;
    and.b32 {second}, {word}, 0xffff0000;
    mul.rn.f32 r, {first}, {rest};
    fma.rn.f32 {first}, {first}, {near}, r;
    mul.rn.f32 r, {second}, {rest};
    fma.rn.f32 {second}, {second}, {near}, r;
"""
FOUR_CODES = Constant(
    "{ .reg .b32 a, b, c, d, r; .reg .b16 low, high;"
    + _QUOTIENTS.format(word="$1", first="a", second="b", near="$3", rest="$7")
    + _QUOTIENTS.format(word="$2", first="c", second="d", near="$3", rest="$7")
    + """
    cvt.rn.satfinite.e4m3x2.f32 low, b, a;
    cvt.rn.satfinite.e4m3x2.f32 high, d, c;
    mov.b32 $0, {low, high};
    }"""
)
# Through FP16, which has every value of e4m3; a source that is not finite stays as it is.
TWO_SERVED = Constant(
    "{ .reg .b32 a, b, r; .reg .b16 codes, low, high; .reg .pred finite;"
    + _QUOTIENTS.format(word="$1", first="a", second="b", near="$2", rest="$4")
    + """
    cvt.rn.satfinite.e4m3x2.f32 codes, b, a;
    cvt.rn.f16x2.e4m3x2 r, codes;
    mov.b32 {low, high}, r;
    cvt.f32.f16 a, low;
    cvt.f32.f16 b, high;
    mul.rn.f32 a, a, $6;
    mul.rn.f32 b, b, $6;
    cvt.rn.bf16x2.f32 r, b, a;
    setp.ne.b32 finite, $8, 0;
    selp.b32 $0, r, $1, finite;
    }"""
)


@triton.jit
def codes_of(x, scale, KIND: tl.constexpr, ROUND: tl.constexpr, PACKED: tl.constexpr):
    """Codes (int8) of source bits, or of `packed_bf16` if `PACKED`: nearest even, saturating at 448."""
    if PACKED:
        near, rest = reciprocal(scale)
        codes = tl.inline_asm_elementwise(
            FOUR_CODES, "=r" + ",r" * 10, [x, near, rest], dtype=tl.int8, is_pure=True, pack=4
        )
    else:
        bits = round_bits_to_bf16(fp32_bits(x, KIND)) if ROUND else fp32_bits(x, KIND)
        lifted, lift = lifted_quotient(bits, scale)
        ulps = lifted.to(tl.int32, bitcast=True) - lift
        code = ulps + ((lift - (0x3C800000 + (20 << 23))) >> 20)
        codes = (code | ((bits >> 24) & 0x80)).to(tl.int8)
    return codes


@triton.jit
def served_of(x, scale, finite, KIND: tl.constexpr, ROUND: tl.constexpr, PACKED: tl.constexpr):
    """BF16 bits of codes times their scale, of what `codes_of` takes; where that is not finite, of itself."""
    if PACKED:
        near, rest = reciprocal(scale)
        arguments = [x, near, rest, scale, finite.to(tl.int32)]
        served = tl.inline_asm_elementwise(
            TWO_SERVED, "=r" + ",r" * 9, arguments, dtype=tl.int16, is_pure=True, pack=2
        )
    else:
        codes = codes_of(x, scale, KIND, ROUND, False).to(tl.int16)
        # The bits behind the sign, moved up by seven, are FP16's of the value over 256: an exact step either way.
        half = ((codes & 0x7F) << 7) | (codes & -32768)
        # The scale times 256 would be infinite, and nothing times it a NaN, beside FP32 sources near the largest.
        product = half.to(tl.float16, bitcast=True).to(tl.float32) * 256.0 * scale
        served = round_bits_to_bf16(product.to(tl.int32, bitcast=True))
        bits = fp32_bits(x, KIND)
        is_nan = (bits & 0x7FFFFFFF) > 0x7F800000
        as_it_is = tl.where(is_nan, bits | 0x00400000, round_bits_to_bf16(bits))
        served = (tl.where(finite, served, as_it_is) >> 16).to(tl.int16)
    return served
