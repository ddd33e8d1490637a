"""How large keys and values can get, from the weights alone, whatever the prompt: one FP64 number per channel. And the
powers of two by which weights may be multiplied without losing a bit.

An RMSNorm gives `n * g` with `|n|_2 <= sqrt(K)`: by Cauchy and Schwarz a channel is at most `sqrt(K) * |W_c * g|_2`, plus
its bias. Activations in e4m3 are a factor `1 + 2**-4`, and for subnormal codes `_SUBNORMAL * sqrt(w) * sqrt(K) * max|g|` of
each group of `w` channels. RoPE turns a pair: each of the two is at most the pair's norm times the length of (cos, sin). A norm
after the projection needs none of this: a pair's is at most `max|g| * sqrt(d)`. Each rounding has its factor here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from .reference import FP8_DTYPE, FP8_MAX

_BF16, _E4M3 = 2.0**-8, 2.0**-4  # largest relative error of rounding to nearest
# Roundings to BF16 on the way: norm (2), projection, bias, cosine and sine, product, sum.
_ROUNDINGS = (1 + _BF16) ** 7
# Sums of FP8 products: tensor cores keep fewer bits than FP32 while they add (Hopper: 13 behind the point).
_ACCUMULATION = 1 + 2.0**-7
_SLACK = _ROUNDINGS * _ACCUMULATION
# A code below e4m3's normal numbers is off by at most 2**-10 of the group's scale, which is at most
# 2 * amax / 448 (rounded up to a power of two), and SGLang's kernels take 1e-10 for the smallest amax.
_SUBNORMAL = 2 * 2.0**-10 / FP8_MAX
_AMAX_FLOOR = 1e-10
_ROWS_AT_ONCE = 32  # whose squares stay in a CPU's cache
_BLOCK = 128  # rows and columns of a blockwise weight's scale; channels of one activation scale beside it
# BF16 and FP32 have the same exponents.
SMALLEST_NORMAL, LARGEST = -126, 127


@dataclass(frozen=True)
class Rows:
    """Rows of a linear layer, as its kernel reads them."""

    weight: torch.Tensor  # `[R, K]`, e4m3 codes or BF16
    scales: torch.Tensor | None = None  # of codes: `[R / 128, K / 128]`, or `[R, 1]` per channel
    bias: torch.Tensor | None = None  # `[R]`


@dataclass(frozen=True)
class Rotation:
    """What a rotary embedding does to a head."""

    head_dim: int
    rotary_dim: int  # how many of its channels it turns, from the first on
    is_neox: bool  # pairs are `(c, c + rotary_dim / 2)`, else `(2c, 2c + 1)`
    gain: float = 1.0  # by how much it makes a pair longer (YaRN does), at least 1


def projected(rows: Rows, gain: torch.Tensor) -> torch.Tensor:
    """Bound on each output of a linear layer behind an RMSNorm with weight `gain`, `[K]`: FP64 `[R]`; NaN or inf where a
    weight, a scale or the norm is."""
    weight, g = rows.weight.detach(), gain.detach().double().abs()
    columns = weight.shape[1]
    of_row, of_block = g.new_ones(1), g.new_ones(-(-len(weight) // _BLOCK), 1)
    if rows.scales is not None:
        scales = rows.scales.detach().double().abs()
        if scales.shape == (len(weight), 1):
            of_row = scales[:, 0]
        else:
            of_block = scales
    exact, bounding = of_row * _norms(weight, of_block, g)
    if rows.scales is not None:  # and activations in e4m3, which share a scale in a group
        in_group = math.sqrt(columns // of_block.shape[1])
        exact = exact * (1 + _E4M3) + bounding * _SUBNORMAL * in_group
    bound = math.sqrt(columns) * exact
    if rows.bias is not None:
        bound = bound + rows.bias.detach().double().abs()
    return bound * _SLACK


def _norms(weight: torch.Tensor, scales: torch.Tensor, g: torch.Tensor) -> torch.Tensor:
    """`|w * s * g|_2` of each row, and `|w * s * G|_2`: in a group of columns an activation is at most its
    largest gain `G` times the norm of `n` in the group. FP64 `[2, R]`, of `[R / 128, groups]` and `[K]`.

    Rows don't meet, so a shard's numbers are those of the whole. A few are read at a time, so that
    nothing of the weight's size is allocated. No square of such a product leaves FP64's normal range.
    """
    width = len(g) // scales.shape[1]
    largest = g.view(-1, width).amax(1).clamp_min(_AMAX_FLOOR)
    gains = torch.stack([g, largest.repeat_interleave(width)])  # [2, K]
    every = torch.arange(256, dtype=torch.uint8, device=weight.device).view(FP8_DTYPE)
    square_of = every.double().square()
    found = []
    for block, of_block in zip(weight.split(_BLOCK), scales, strict=True):
        factors = (of_block.repeat_interleave(width) * gains).square()  # [2, K]
        for rows in block.split(_ROWS_AT_ONCE):
            if weight.dtype == FP8_DTYPE:  # looked up, as a CPU converts e4m3 an element at a time
                codes = rows.view(torch.uint8).flatten().int()
                squares = square_of.index_select(0, codes).view(rows.shape)
            else:
                squares = rows.double().square()
            found.append(torch.stack([_row_sums(squares * one) for one in factors]))
    return _square_root(torch.cat(found, 1))


def _square_root(values: torch.Tensor) -> torch.Tensor:
    """To nearest, as a GPU and NumPy do it: torch's own of FP64 on a CPU is an ulp off for one number in a hundred."""
    if values.device.type != "cpu":
        return values.sqrt()
    return torch.from_numpy(np.sqrt(values.numpy()))


def _row_sums(values: torch.Tensor) -> torch.Tensor:
    """Of each row, halves added to halves: the order of torch's sums depends on the device and its threads."""
    while (columns := values.shape[1]) > 1:
        half = columns // 2
        odd = values[:, 2 * half :]
        values = values[:, :half] + values[:, half : 2 * half]
        values[:, : odd.shape[1]] += odd
    return values[:, 0]


def rotated(bound: torch.Tensor, rotation: Rotation) -> torch.Tensor:
    """Bound on what a rotary embedding makes of channels with these bounds: FP64 `[heads * head_dim]`."""
    heads = bound.view(-1, rotation.head_dim).clone()
    turned = heads[:, : rotation.rotary_dim]
    half = rotation.rotary_dim // 2
    pairs = turned.view(-1, 2, half) if rotation.is_neox else turned.view(-1, half, 2)
    axis = 1 if rotation.is_neox else 2
    norms = _square_root(pairs.square().sum(axis, keepdim=True)) * rotation.gain
    heads[:, : rotation.rotary_dim] = norms.expand_as(pairs).reshape(turned.shape)
    return heads.view(-1)


def normed(gain: torch.Tensor, rotation: Rotation) -> torch.Tensor:
    """Bound on every channel of a head behind its own RMSNorm, with weight `gain` `[head_dim]`, and a
    rotary embedding: FP64 scalar."""
    largest = gain.detach().double().abs().amax()
    return math.sqrt(gain.numel()) * largest * rotation.gain * _SLACK


def magnitudes(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Smallest magnitude that is not zero, and largest, over all of them: FP32 `[2]`, on their device; `[inf, 0]` where all
    are zero, NaN where one has a NaN."""
    found = torch.cat([one.detach().float().abs().flatten() for one in tensors])
    return torch.stack([found.masked_fill(found == 0, math.inf).amin(), found.amax()])


def exact_range(smallest: float, largest: float) -> tuple[int, int]:
    """The lowest and the highest `e` with which numbers of these `magnitudes` times `2**e` lose nothing.

    0 always lies between. A subnormal has fewer bits than it would need one binade lower, so it may only
    move up. What is not finite does not move at all, and nothing by more than there is a normal power of two for, both ways.
    """
    furthest = -SMALLEST_NORMAL
    if largest == 0:
        return -furthest, furthest
    if not (math.isfinite(smallest) and math.isfinite(largest)):
        return 0, 0
    least, most = math.frexp(smallest)[1] - 1, math.frexp(largest)[1] - 1
    low = min(SMALLEST_NORMAL - least, 0) if least >= SMALLEST_NORMAL else 0
    return max(low, -furthest), min(max(LARGEST - most, 0), furthest)


def multiply_by_powers(tensors: Sequence[torch.Tensor], exponents: Sequence[int]) -> None:
    """`tensor *= 2**exponent` (126 at most) for each BF16 or FP32 tensor, in place; exact within `exact_range`."""
    moved = [(one, e) for one, e in zip(tensors, exponents, strict=True) if e]
    if moved:
        torch._foreach_mul_([one for one, _ in moved], [math.ldexp(1.0, e) for _, e in moved])


def smallest_exponent(bound: float, limit: float) -> int:
    """The smallest `e` with `bound <= limit * 2**e`, both positive and finite. No rounding in it."""
    fraction_of_bound, of_bound = math.frexp(bound)
    fraction_of_limit, of_limit = math.frexp(limit)
    return of_bound - of_limit + (fraction_of_bound > fraction_of_limit)
