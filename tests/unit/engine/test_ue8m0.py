"""Packed power-of-two scales against DeepGEMM's own layout functions, on a CPU.

What packs needs DeepGEMM's Python package, as SGLang's own packing does; what is refused before needs none.
"""

from __future__ import annotations

import pytest
import torch
from support.by_definition import quantize_blockwise

from sglang_fp8rl.engine.modules.method import ServedWithPackedScales, pack
from sglang_fp8rl.errors import HostError

SHAPES = [(128, 128), (256, 512), (384, 640), (576, 7168), (320, 256)]


@pytest.fixture
def fp8_utils():
    return pytest.importorskip("sglang.srt.layers.quantization.fp8_utils")


@pytest.fixture
def layout(fp8_utils):
    """DeepGEMM's; SGLang's functions import it too."""
    return pytest.importorskip("deep_gemm.utils.layout")


def weight_of(rows, columns, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, columns, generator=generator) * torch.logspace(-3, 1, columns)


def exponents(packed, columns):
    """Byte by byte, without the functions under test: int32 holds four columns, lowest first."""
    words = packed.contiguous().to(torch.int64) & 0xFFFFFFFF
    parts = [(words >> (8 * place)) & 0xFF for place in range(4)]
    return torch.stack(parts, dim=-1).flatten(-2)[..., :columns]


@pytest.mark.parametrize("shape", SHAPES)
def test_every_row_has_the_exponent_of_its_block(layout, shape):
    _, scale = quantize_blockwise(weight_of(*shape, 0), pow2_scale=True)
    packed = pack(scale, shape[0], "w")
    blocks = scale.shape[1]
    assert packed.dtype == torch.int32
    assert packed.shape == (shape[0], -(-blocks // 4))
    expected = torch.log2(scale).round().long() + 127
    expected = expected.repeat_interleave(128, 0)[: shape[0]]
    assert torch.equal(exponents(packed, blocks), expected)
    padding = exponents(packed, 4 * packed.shape[1])[:, blocks:]
    assert not padding.any()


@pytest.mark.parametrize("shape", SHAPES)
def test_memory_is_column_major_and_aligned_for_tma(layout, shape):
    _, scale = quantize_blockwise(weight_of(*shape, 1), pow2_scale=True)
    packed = pack(scale, shape[0], "w")
    assert packed.stride(0) == 1
    aligned = layout.get_tma_aligned_size(shape[0], 4)
    assert aligned % 4 == 0
    assert packed.shape[1] == 1 or packed.stride(1) == aligned


def test_sglangs_inverse_gives_the_canonical_scales_back(layout, fp8_utils):
    _, scale = quantize_blockwise(weight_of(256, 512, 2), pow2_scale=True)
    assert torch.equal(fp8_utils.inverse_transform_scale_ue8m0(pack(scale, 256, "w"), 256), scale)


def test_sglangs_requantization_stands_for_the_same_values_and_ours_keeps_the_bytes(fp8_utils):
    """What SGLang would do in place of this: dequantize, quantize again with powers of two."""
    codes, scale = quantize_blockwise(weight_of(256, 512, 3), pow2_scale=True)
    values = codes.float() * scale.repeat_interleave(128, 0).repeat_interleave(128, 1)
    again, again_scale = fp8_utils.quant_weight_ue8m0(values.to(torch.bfloat16), [128, 128])
    wide = again_scale.repeat_interleave(128, 0).repeat_interleave(128, 1)
    assert torch.equal(again.float() * wide, values)


def test_experts_are_packed_one_by_one(layout):
    pairs = [quantize_blockwise(weight_of(256, 512, seed), pow2_scale=True) for seed in range(3)]
    scales = torch.stack([scale for _, scale in pairs])
    packed = pack(scales, 256, "w13")
    for expert in range(3):
        assert torch.equal(packed[expert], pack(scales[expert], 256, "w"))


def test_the_second_update_derives_again_into_the_same_memory(layout):
    layer = torch.nn.Module()
    codes, scale = quantize_blockwise(weight_of(256, 512, 4), pow2_scale=True)
    layer.weight = torch.nn.Parameter(codes.clone(), requires_grad=False)
    layer.weight_scale_inv = torch.nn.Parameter(scale.clone(), requires_grad=False)
    served = ServedWithPackedScales(layer, {"weight": "weight_scale_inv"}, "layer")
    first = served.weight_scale_inv.clone()
    address = served.weight_scale_inv.data_ptr()
    codes, scale = quantize_blockwise(8 * weight_of(256, 512, 5), pow2_scale=True)
    layer.weight.data.copy_(codes)
    layer.weight_scale_inv.data.copy_(scale)
    served.derive()
    assert served.weight_scale_inv.data_ptr() == address
    assert torch.equal(served.weight_scale_inv, pack(scale, 256, "w"))
    assert not torch.equal(served.weight_scale_inv, first)
    assert layer.weight_scale_inv.dtype == torch.float32  # what updates write is left alone
    assert served.weight is layer.weight


def test_scales_that_are_no_powers_of_two_are_refused_with_the_option_that_helps():
    _, scale = quantize_blockwise(weight_of(256, 512, 6))
    with pytest.raises(HostError, match=r"layer\.weight_scale_inv.*use_weight_pow2_scale"):
        pack(scale, 256, "layer.weight_scale_inv")
