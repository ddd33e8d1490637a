"""The bound on keys and values holds against inputs that are made to break it.

The layer is RMSNorm in BF16, activations quantized to e4m3, FP8 × FP8, BF16, bias, rotation, BF16: the CPU
platform's linear layers and torch. An input is aligned with a channel (Cauchy and Schwarz is an equality
there), and lies where roundings go the same way.
"""

import math

import pytest
import torch

from sglang_fp8rl.lab.cpu_platform.cpu_linear import apply_fp8_linear, block_fp8_linear
from sglang_fp8rl.numerics import dequantize, kv_bounds, quantize_blockwise, quantize_per_channel
from sglang_fp8rl.numerics.kv_bounds import Rotation, Rows, normed, projected, rotated

HIDDEN, HEAD = 512, 64
BF16 = torch.bfloat16


def rms_norm(hidden, weight):
    x = hidden.to(BF16).float()
    x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)
    return (x * weight.float()).to(BF16)


def layer(kind, weight, bias=None):
    """`Rows`, and the function that the engine computes with them."""
    if kind == "bf16":
        held = weight.to(BF16)
        return Rows(held, None, bias), lambda x: _biased(
            (x.double() @ held.double().T).to(BF16), bias
        )
    if kind == "blockwise":
        codes, scales = quantize_blockwise(weight)
        return Rows(codes, scales, bias), lambda x: _biased(
            block_fp8_linear(x, codes, [128, 128], scales), bias
        )
    codes, scales = quantize_per_channel(weight)
    return Rows(codes, scales, bias), lambda x: _biased(
        apply_fp8_linear(input=x, weight=codes.t(), weight_scale=scales), bias
    )


def _biased(y, bias):
    return y if bias is None else y + bias


def values_of(rows):
    if rows.scales is None:
        return rows.weight.double()
    return dequantize(rows.weight, rows.scales, dtype=torch.float32).double()


def weights(name, seed=0):
    """Shapes of weights that a bound could get wrong: `(weight, gain)`."""
    draw = torch.Generator().manual_seed(seed)
    weight = torch.randn(128, HIDDEN, generator=draw) / HIDDEN**0.5
    gain = 1 + 0.1 * torch.randn(HIDDEN, generator=draw)
    if name == "one massive gain":
        gain[17] = 60.0
    elif name == "one massive column":
        weight[:, 300] *= 200
    elif name == "one column alone":
        weight *= (torch.arange(HIDDEN) == 5).float()
    elif name == "equal magnitudes":
        weight = weight.sign()
        gain = torch.ones(HIDDEN)
    elif name == "tiny gains":
        gain *= 1e-20
    elif name == "ranges apart":
        gain *= 2.0 ** torch.randint(-12, 12, (HIDDEN,), generator=draw)
    return weight, gain.to(BF16)


NAMES = [
    "plain",
    "one massive gain",
    "one massive column",
    "one column alone",
    "equal magnitudes",
    "tiny gains",
    "ranges apart",
]


def attacks(direction, gain, seed=0):
    """Hidden states that are aligned with a direction `[K]`, and variants that rounding favours."""
    draw = torch.Generator().manual_seed(seed)
    yield direction
    yield direction * 1e4
    yield direction * 1e-6
    # One element a group sets its scale; the others lie just above the middle of two codes.
    for at in range(0, 128, 31):
        wanted = torch.full_like(direction, 272.5 / 448)
        wanted[at::128] = 1.0
        yield direction.sign() * wanted / gain.double().abs().clamp_min(1e-30)
    for _ in range(6):
        yield direction * (1 + 0.06 * torch.randn(len(direction), generator=draw).double())


def largest_outputs(run, rows, gain, channels):
    """For each channel the largest magnitude that any attack reaches."""
    held = values_of(rows) * gain.double()
    hidden = torch.stack([x for c in channels for x in attacks(held[c], gain, c)])
    found = run(rms_norm(hidden, gain)).double().abs()
    return found.view(len(channels), -1, found.shape[1]).amax(1)[
        torch.arange(len(channels)), torch.tensor(channels)
    ]


@pytest.mark.parametrize("with_bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("kind", ["blockwise", "per_channel", "bf16"])
@pytest.mark.parametrize("name", NAMES)
def test_no_input_exceeds_the_bound_of_a_projection_and_some_come_close(name, kind, with_bias):
    weight, gain = weights(name)
    bias = torch.linspace(-3, 3, 128).to(BF16) if with_bias else None
    rows, run = layer(kind, weight, bias)
    bound = projected(rows, gain)
    channels = list(range(0, 128, 25))
    found = largest_outputs(run, rows, gain, channels)
    assert (found <= bound[channels]).all()
    if not with_bias and name != "tiny gains":  # whose squares vanish beside RMSNorm's epsilon
        assert (found >= 0.8 * bound[channels]).all(), (found / bound[channels]).min()


def test_without_its_rounding_factors_the_bound_would_be_broken():
    weight, gain = weights("equal magnitudes")
    rows, run = layer("blockwise", weight)
    bare = math.sqrt(HIDDEN) * (values_of(rows) * gain.double()).square().sum(1).sqrt()
    found = largest_outputs(run, rows, gain, [0, 1, 2])
    assert (found > 1.04 * bare[:3]).all()
    assert (found <= projected(rows, gain)[:3]).all()


@pytest.mark.parametrize("is_neox", [True, False], ids=["halves", "neighbours"])
@pytest.mark.parametrize("rotary_dim", [HEAD, HEAD // 2])
@pytest.mark.parametrize("gain", [1.0, 1.35])
def test_no_position_turns_a_pair_beyond_the_bound(is_neox, rotary_dim, gain):
    weight, norm = weights("plain", seed=3)
    half = rotary_dim // 2
    pairs = [(0, half) if is_neox else (0, 1), (3, 3 + half) if is_neox else (6, 7)]
    for one, other in pairs:
        weight[other] = weight[one]  # one input is the largest for both
    rows, run = layer("blockwise", weight)
    rotation = Rotation(HEAD, rotary_dim, is_neox, gain)
    bound = rotated(projected(rows, norm), rotation)
    held = values_of(rows) * norm.double()
    for one, other in pairs:
        both = torch.stack([held[one], held[other]])
        longest, reached = torch.linalg.svd(both, full_matrices=False).Vh[0], 0.0
        for hidden in attacks(longest, norm):
            keys = run(rms_norm(hidden[None], norm))[0].double()
            for angle in torch.linspace(0, 6.3, 64).double():
                turned = gain * (keys[one] * angle.cos() - keys[other] * angle.sin())
                assert turned.abs() <= bound[one]
            reached = max(reached, float(gain * keys[[one, other]].norm()))
        assert reached >= 0.8 * bound[one]
    rest = bound.view(-1, HEAD)[:, rotary_dim:]
    assert torch.equal(rest, projected(rows, norm).view(-1, HEAD)[:, rotary_dim:])


def test_a_head_behind_its_own_norm_reaches_its_bound_with_one_channel_alone():
    gain = (1 + 0.3 * torch.randn(HEAD, generator=torch.Generator().manual_seed(1))).to(BF16)
    bound = normed(gain, Rotation(HEAD, HEAD, True))
    largest = int(gain.abs().argmax())
    alone = torch.nn.functional.one_hot(torch.tensor(largest), HEAD) * 1e4
    draw = torch.randn(4000, HEAD, generator=torch.Generator().manual_seed(2))
    found = rms_norm(torch.cat([alone[None], draw]), gain).double().abs().amax()
    assert 0.95 * bound <= found <= bound


def test_a_shard_s_bounds_are_those_of_the_whole_by_bytes():
    weight, gain = weights("ranges apart", seed=5)
    weight = torch.cat([weight, weight.roll(7)])
    for kind in ("blockwise", "per_channel", "bf16"):
        whole = projected(layer(kind, weight)[0], gain)
        parts = [projected(layer(kind, part)[0], gain) for part in weight.split(128)]
        assert torch.equal(torch.cat(parts), whole)


@pytest.mark.parametrize("spoiled", ["scale", "code", "gain", "bias"])
def test_what_is_not_finite_has_no_finite_bound(spoiled):
    weight, gain = weights("plain")
    rows, _ = layer("blockwise", weight, torch.zeros(128, dtype=BF16))
    {
        "scale": rows.scales,
        "code": rows.weight.view(torch.uint8),
        "gain": gain,
        "bias": rows.bias,
    }[spoiled].view(-1)[0] = 0x7F if spoiled == "code" else math.nan
    assert not math.isfinite(float(projected(rows, gain).amax()))


def test_rows_of_every_code_have_the_norms_of_their_values_and_nan_is_told():
    draw = torch.Generator().manual_seed(4)
    every = torch.arange(256, dtype=torch.uint8)
    every[every & 0x7F == 0x7F] = 5
    codes = torch.stack([every.roll(n) for n in range(64)] * 5).view(torch.float8_e4m3fn)
    scales = torch.rand(3, 4, generator=draw).double() * 2.0 ** torch.tensor([[-60], [0], [60]])
    gain = torch.rand(256, generator=draw).double()
    largest = gain.view(4, 64).amax(1)
    gains = torch.stack([gain, largest.repeat_interleave(64)])
    factors = gains[:, None] * scales.repeat_interleave(64, 1)
    expected = [
        (codes.double() * one.repeat_interleave(128, 0)[:320]).norm(dim=1) for one in factors
    ]
    for found, exact in zip(kv_bounds._norms(codes, scales, gain), expected, strict=True):
        torch.testing.assert_close(found, exact, rtol=1e-12, atol=0)
    codes.view(torch.uint8)[3, 70] = 0xFF
    for found in kv_bounds._norms(codes, scales, gain):
        assert found.isnan().nonzero().tolist() == [[3]]


@pytest.mark.parametrize("kind", ["blockwise", "per_channel", "bf16"])
def test_what_vanishes_in_fp32_beside_the_largest_counts(kind):
    weight, gain = weights("plain")
    gain *= 2.0**-80  # its square is 0 in FP32
    gain[:128], weight[:, :128] = 1.0, 0.0  # the largest gains meet no weight
    weight[64:, 0] = 1.0  # ... in these rows
    rows, run = layer(kind, weight)
    hidden = values_of(rows)[:64].sign()
    hidden[:, :128] = 0
    found = run(rms_norm(hidden, gain)).double().abs().diagonal()
    bound = projected(rows, gain)[:64]
    assert (bound >= math.sqrt(HIDDEN) * (values_of(rows)[:64] * gain.double()).norm(dim=1)).all()
    assert (found <= bound).all()
    if kind != "per_channel":  # where activations share one scale, that is as large as its largest
        assert (bound < 1e-6).all()
