"""Adversarial matrices by name, and destinations that show every byte that was (not) written."""

import itertools

import torch

from sglang_fp8rl.numerics import FP8_DTYPE

POISON_CODE = 0x7F  # NaN: no finite block ever stores it
POISON_SCALE = -7.0
ROUNDINGS = [
    {"pow2_scale": p, "round_to_bf16": r} for p, r in itertools.product([False, True], repeat=2)
]


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """Integers of the same size, so that -0.0, NaN payloads and FP8 compare bit by bit."""
    sizes = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor if tensor.dtype == torch.bool else tensor.view(sizes[tensor.element_size()])


def same_bits(actual: torch.Tensor, expected: torch.Tensor) -> bool:
    return actual.shape == expected.shape and torch.equal(bits(actual), bits(expected))


def destination(rows: int, cols: int, scale_shape: tuple[int, ...], device="cpu"):
    """Poisoned codes and scales inside larger poisoned buffers, at odd offsets and strides."""
    shape = (rows + 3, cols + 5)
    codes = torch.full(shape, POISON_CODE, dtype=torch.uint8, device=device).view(FP8_DTYPE)
    scales = torch.full([n + 2 for n in scale_shape], POISON_SCALE, device=device)
    inner = scales[tuple(slice(1, 1 + n) for n in scale_shape)]
    return codes, codes[2 : 2 + rows, 3 : 3 + cols], scales, inner


def outside_is_untouched(codes: torch.Tensor, scales: torch.Tensor, rows: int, cols: int) -> bool:
    outer = bits(codes).clone()
    outer[2 : 2 + rows, 3 : 3 + cols] = POISON_CODE
    rim = scales.clone()
    rim[tuple(slice(1, n - 1) for n in scales.shape)] = POISON_SCALE
    return bool((outer == POISON_CODE).all() and (rim == POISON_SCALE).all())


def _random(rows: int, cols: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, cols, generator=torch.Generator().manual_seed(seed))


def _a_distribution_per_tile() -> torch.Tensor:
    x = _random(260, 390)
    exponents = torch.arange(3 * 4).view(3, 4).float() * 9 - 60
    grown = exponents.exp2().repeat_interleave(128, 0).repeat_interleave(128, 1)
    return x * grown[:260, :390]


def _zero_block_with_negative_zeros() -> torch.Tensor:
    x = _random(128, 256)
    x[:, 128:] = 0.0
    x[::3, 128:] = -0.0
    x[::5, :128] = -0.0
    return x


def _beside_bf16_boundaries() -> torch.Tensor:
    """Each BF16 tie between 2**-9 and 2**9, one FP32 ulp below it and one above."""
    upper = torch.arange(0x3B00, 0x4400, dtype=torch.int32)[:, None] << 16
    around = torch.tensor([0x7FFF, 0x8000, 0x8001, 0, 1, 0xFFFF], dtype=torch.int32)
    return (upper | around).view(torch.float32).reshape(-1, 128)


def _beside_e4m3_boundaries() -> torch.Tensor:
    """Scale exactly 1: every BF16 value from 0 to 448, so every tie and its neighbours."""
    upper = torch.arange(0, 0x43E1, dtype=torch.int32) << 16
    x = torch.cat([upper.view(torch.float32), torch.full((128 - 0x43E1 % 128,), 448.0)])
    x = x.view(-1, 128).clone()
    x[:, -1] = 448.0
    x[1::2] = -x[1::2]
    return x


def _subnormals() -> torch.Tensor:
    """FP32 subnormals; BF16 keeps the upper seven bits of them."""
    values = torch.arange(1, 128 * 128 + 1, dtype=torch.int32) * 509
    return values.view(torch.float32).view(128, 128)


def _amax_over_448_is_subnormal() -> torch.Tensor:
    return _random(100, 130) * 1e-37


def _largest_finite() -> torch.Tensor:
    x = torch.full((64, 200), 3.3895313892515355e38)
    x[1::2] *= -1
    return x


def _every_amax_of_a_binade() -> torch.Tensor:
    """Row i: the BF16 amax 2 - i / 128, and every positive BF16 value below it down to 2**-8.

    Per channel this has all quotients that block quantization of BF16 weights can give, up to a
    power of two, so a division that is not exact (a reciprocal, say) shows.
    """
    values = (torch.arange(0x3B80, 0x4000, dtype=torch.int32) << 16).view(torch.float32)
    amax = values[-128:].flip(0)[:, None]
    return torch.where(values <= amax, values, 0.0)


CASES = {
    "a distribution per tile": _a_distribution_per_tile(),
    "zero block with negative zeros": _zero_block_with_negative_zeros(),
    "one ulp beside bf16 boundaries": _beside_bf16_boundaries(),
    "one ulp beside e4m3 boundaries": _beside_e4m3_boundaries(),
    "every amax of a binade": _every_amax_of_a_binade(),
    "subnormals": _subnormals(),
    "amax / 448 is subnormal": _amax_over_448_is_subnormal(),
    "all the largest bf16": _largest_finite(),
    "fp16 max": torch.tensor([[65504.0, -65504.0, 2.0**-24, -(2.0**-14), 65488.0]]).half(),
    "fp16 subnormals": torch.arange(1, 1025, dtype=torch.int16).view(torch.float16).view(8, 128),
    "fp16": _random(130, 140, 1).half(),
    "bf16": _random(130, 140, 2).bfloat16(),
    "bf16 with a distribution per tile": _a_distribution_per_tile().bfloat16(),
    "1x1": _random(1, 1),
    "1x129": _random(1, 129),
    "129x1": _random(129, 1),
    "127x257": _random(127, 257),
    "128x128": _random(128, 128),
    "576x1368": _random(576, 1368),
    "transposed": _random(257, 130).t(),
    "transposed bf16": _random(257, 130).bfloat16().t(),
    "every second column": _random(130, 300)[:, ::2],
    "rows at an odd offset": _random(140, 301)[3:133, 7:300],
    "one row expanded": _random(1, 200).expand(130, 200),
    "one column expanded": _random(130, 1).expand(130, 200),
}


def not_finite(dtype: torch.dtype) -> torch.Tensor:
    """A NaN and an Inf, each in a block of its own, beside what is finite; two blocks have neither."""
    x = torch.randn(140, 150, generator=torch.Generator().manual_seed(3)).to(dtype)
    x[3, 4], x[139, 149] = float("nan"), -float("inf")
    return x


def random_bytes(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Every bit pattern that there is."""
    generator = torch.Generator().manual_seed(seed)
    wide = (*shape[:-1], shape[-1] * dtype.itemsize)
    return torch.randint(0, 256, wide, dtype=torch.uint8, generator=generator).view(dtype)


def scale_shape(source: torch.Tensor, per_channel: bool) -> tuple[int, int]:
    return (source.shape[0], 1) if per_channel else tuple(-(-size // 128) for size in source.shape)
