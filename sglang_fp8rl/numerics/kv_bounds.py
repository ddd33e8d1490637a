"""How large a key or a value can become, from weights alone, whatever the prompt.

RMSNorm's output is `n * g` with `|n|_2 <= sqrt(K)` (`eps` only makes it smaller), so by Cauchy and
Schwarz a channel of the projection behind it is at most `sqrt(K) * |W_c * g|_2` plus its bias. A rotary
embedding turns pairs of channels, so the norm of a pair bounds either of them. With a norm of its own
behind the projection (`q_norm`, `k_norm`) a head is `n * g` again, with `|n|_2 <= sqrt(d)`.

Between that and the number that is stored lie roundings, and each of them has its factor here; the proof
is in `docs/kv_cache.md`. One number per channel, FP64 but for sums of squares of codes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from .backends import is_there
from .reference import FP8_DTYPE, FP8_MAX

_BF16, _E4M3 = 2.0**-8, 2.0**-4  # largest relative error of rounding to nearest
# Roundings to BF16 on the way: norm (2), projection, bias, cosine and sine, product, sum. The eighth is
# for what is computed here: an FP32 sum of K squares is off by K * 2**-25 of itself, behind its root.
_ROUNDINGS = (1 + _BF16) ** 8
# Sums of FP8 products: tensor cores keep fewer bits than FP32 while they add (Hopper: 13 behind the point).
_ACCUMULATION = 1 + 2.0**-7
_SLACK = _ROUNDINGS * _ACCUMULATION
# A code below e4m3's normal numbers is off by at most 2**-10 of the group's scale, which is at most
# 2 * amax / 448 (rounded up to a power of two), and SGLang's kernels take 1e-10 for the smallest amax.
_SUBNORMAL = 2 * 2.0**-10 / FP8_MAX
_AMAX_FLOOR = 1e-10
GROUP = 128  # channels of one activation scale beside a blockwise weight
_ROWS_AT_ONCE = 128
# A gain's square counts as this share of the largest one at least, so that FP32 can hold its products.
_LEAST = 2.0**-100


@dataclass(frozen=True)
class Rows:
    """Rows of a linear layer, as its kernel reads them.

    Attributes:
        weight: `[R, K]`, e4m3 codes or BF16.
        scales: of e4m3 codes: `[R / 128, K / 128]` blockwise, or `[R, 1]` per channel.
        bias: `[R]`.
    """

    weight: torch.Tensor
    scales: torch.Tensor | None = None
    bias: torch.Tensor | None = None


@dataclass(frozen=True)
class Rotation:
    """What a rotary embedding does to a head.

    Attributes:
        head_dim: channels of a head.
        rotary_dim: how many of them it turns, from the first on.
        is_neox: pairs are `(c, c + rotary_dim / 2)`, else `(2c, 2c + 1)`.
        gain: by how much it makes a pair longer (YaRN does), at least 1.
    """

    head_dim: int
    rotary_dim: int
    is_neox: bool
    gain: float = 1.0


def projected(rows: Rows, gain: torch.Tensor) -> torch.Tensor:
    """Bound on each output of a linear layer behind an RMSNorm.

    Args:
        gain: `[K]`, the norm's weight.

    Returns:
        FP64 `[R]`; NaN or inf where a weight, a scale or the norm is.
    """
    columns = rows.weight.shape[1]
    g = gain.detach().double().abs()
    weight = rows.weight.detach()
    if rows.scales is None:
        bound = _norms(weight, g, columns)[0]
    else:
        bound = _quantized(weight, rows.scales.detach().double().abs(), g)
    bound = math.sqrt(columns) * bound
    if rows.bias is not None:
        bound = bound + rows.bias.detach().double().abs()
    return bound * _SLACK


def _quantized(codes: torch.Tensor, scales: torch.Tensor, g: torch.Tensor) -> torch.Tensor:
    """As `projected`, over `sqrt(K)`, with the activations quantized in front of it."""
    rows, columns = codes.shape
    is_blockwise = scales.shape[1] > 1 or scales.shape[0] < rows
    if is_blockwise:
        width = GROUP
        exact, off = _norms(codes, g, width, scales)
    else:
        width = columns
        exact, off = (scales[:, 0] * norm for norm in _norms(codes, g, width))
    return exact * (1 + _E4M3) + off * _SUBNORMAL * math.sqrt(width)


def _norms(
    weight: torch.Tensor, g: torch.Tensor, width: int, scales: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """`|w * s * g|_2` of each row, and `|w * s * G|_2`: in a group of `width` columns an activation is at
    most its largest gain `G` times the norm of `n` in the group. FP64 `[R]` each.

    Rows don't meet, so a shard's numbers are those of the whole.

    Args:
        g: FP64 `[K]`.
        scales: FP64 `[R / 128, K / 128]`; None for 1.
    """
    largest = g.view(-1, width).amax(1).clamp_min(_AMAX_FLOOR)  # [groups]
    if weight.dtype == FP8_DTYPE and weight.device.type == "cpu" and is_there("numba"):
        from .cpu.row_norms import row_norms

        if scales is None:
            return row_norms(weight, largest.new_ones(1, len(largest)), len(weight), g, largest)
        return row_norms(weight, scales, GROUP, g, largest)
    top = g.amax().clamp_min(torch.finfo(torch.float64).tiny)
    relative = (g / top).square().clamp_min(_LEAST).float()
    behind_norm, plain = _energies(weight, relative, width)  # [R, groups]
    if scales is not None:
        squares = scales.repeat_interleave(GROUP, 0)[: len(weight)].square()  # [R, K / 128]
        behind_norm, plain = behind_norm * squares, plain * squares
    return top * behind_norm.sum(1).sqrt(), (plain * largest.square()).sum(1).sqrt()


def _energies(
    weight: torch.Tensor, gain: torch.Tensor, width: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sums of `(w * g)**2` and of `w**2` over groups of `width` columns: each FP64 `[R, K / width]`.

    A few rows at a time, so that nothing of the weight's size is allocated.

    Args:
        gain: FP32 `[K]`, the squares of `g`.
    """
    found = []
    by_group = gain.view(-1, width)
    for chunk in weight.split(_ROWS_AT_ONCE):
        squares = chunk.to(torch.float32 if chunk.dtype == FP8_DTYPE else torch.float64).square_()
        groups = squares.view(len(chunk), -1, width)
        plain = groups.sum(2).double()
        found.append((groups.mul_(by_group).sum(2).double(), plain))
    behind_norm, plain = zip(*found, strict=True)
    return torch.cat(behind_norm), torch.cat(plain)


def rotated(bound: torch.Tensor, rotation: Rotation) -> torch.Tensor:
    """Bound on what a rotary embedding makes of channels with these bounds: FP64 `[heads * head_dim]`."""
    heads = bound.view(-1, rotation.head_dim).clone()
    turned = heads[:, : rotation.rotary_dim]
    half = rotation.rotary_dim // 2
    pairs = turned.view(-1, 2, half) if rotation.is_neox else turned.view(-1, half, 2)
    axis = 1 if rotation.is_neox else 2
    norms = pairs.square().sum(axis, keepdim=True).sqrt() * rotation.gain
    heads[:, : rotation.rotary_dim] = norms.expand_as(pairs).reshape(turned.shape)
    return heads.view(-1)


def normed(gain: torch.Tensor, rotation: Rotation) -> torch.Tensor:
    """Bound on every channel of a head behind its own RMSNorm and a rotary embedding: FP64 scalar.

    Args:
        gain: `[head_dim]`, the norm's weight.
    """
    largest = gain.detach().double().abs().amax()
    return math.sqrt(gain.numel()) * largest * rotation.gain * _SLACK
