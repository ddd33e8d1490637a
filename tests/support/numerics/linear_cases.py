"""Products by name: what is multiplied, and what is exact in whatever order it is added up."""

from __future__ import annotations

import torch

from sglang_fp8rl.numerics import FP8_DTYPE, quantize

BLOCK = (128, 128)
# Tokens on either side of a tile's size, rows and columns that divide nothing: `m, n, k, block`.
SHAPES = [
    (1, 200, 1024, BLOCK),
    (16, 40, 640, BLOCK),
    (17, 96, 128, BLOCK),
    (33, 130, 256, BLOCK),
    (64, 96, 384, BLOCK),
    (130, 257, 256, BLOCK),
    (2, 96, 100, None),
    (31, 40, 576, None),
    (40, 70, 333, None),
    (65, 33, 20, None),
    (2, 64 * 132 + 5, 256, BLOCK),  # the larger tile
    (1, 64 * 132, 20, None),
]


def case(
    m: int,
    n: int,
    k: int,
    block: tuple[int, int] | None,
    *,
    dtype: torch.dtype = torch.bfloat16,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`x`, codes, scales (of rows without `block`); another magnitude in every block and row."""
    generator = torch.Generator().manual_seed(m + 1000 * n + k)
    weight = torch.randn(n, k, generator=generator)
    grown = torch.logspace(-2, 2, -(-n // 128) * -(-k // 128)).view(-(-n // 128), -(-k // 128))
    weight *= grown.repeat_interleave(128, 0).repeat_interleave(128, 1)[:n, :k]
    codes, scale = quantize(weight, block or (1, k))
    x = torch.randn(m, k, generator=generator).to(dtype)
    return x, codes, scale.view(n, 1) if block is None else scale


def exact_case(
    m: int, n: int, k: int, block: tuple[int, int] | None, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Few small integers in a row of zeros, and powers of two as scales: every sum and result is exact."""
    generator = torch.Generator().manual_seed(m + n + k)

    def integers(*shape: int) -> torch.Tensor:
        return torch.randint(-2, 3, shape, generator=generator).float()

    x = integers(m, k) * (torch.rand(m, k, generator=generator) < 24 / k)
    scale_shape = (-(-n // block[0]), -(-k // block[1])) if block else (n, 1)
    exponents = torch.randint(-1, 1, scale_shape, generator=generator).float()
    return x.to(dtype), integers(n, k).to(FP8_DTYPE), exponents.exp2()


def every_code(
    block: tuple[int, int] | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Each finite code times one, alone in its sum."""
    finite = torch.arange(256, dtype=torch.uint8)
    finite = finite[(finite & 0x7F) != 0x7F]  # 254
    codes = torch.zeros(2, 128, dtype=torch.uint8)
    codes.view(-1)[:254] = finite
    scale = torch.ones(1, 1) if block else torch.ones(2, 1)
    return torch.eye(128).bfloat16(), codes.view(FP8_DTYPE), scale
