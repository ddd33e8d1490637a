"""The instructions of the packed GPU kernels, executed on a CPU: the reference's bytes."""

from __future__ import annotations

import numpy as np
import pytest
import torch

pytest.importorskip("triton")
pytest.importorskip("numba")

from support.numerics import ptx

from sglang_fp8rl.numerics import quantize, through_fp8
from sglang_fp8rl.numerics.triton.arithmetic import FOUR_CODES, TWO_SERVED
from tools import packed_quotient

INF = 0x7F80
# Of every binade, and of every mantissa; the smallest and the largest.
AMAXES = [1, 5, 0x7F, 0x80, *range(0x100, INF, 0x1D3), *range(0x3F80, 0x4000, 7), INF - 1]


def magnitudes_to(amax: int) -> np.ndarray:
    """BF16 bits: the amax, all magnitudes of the 14 binades below it, the smallest ones; both signs."""
    found = np.unique(
        np.r_[amax, np.arange(max(0, amax - 14 * 128), amax), np.arange(min(amax, 9))]
    )
    return np.r_[found, found | 0x8000].astype(np.uint32)


def constants(amax: int, size: int, *names: str) -> ptx.Registers:
    scale = packed_quotient.scale_inv(np.uint32(amax), False)
    near, rest = packed_quotient.reciprocal(np.float32(scale))
    values = (near, rest, scale)[: len(names)]
    return {
        name: np.full(size, np.float32(one)).view(np.uint32)
        for name, one in zip(names, values, strict=True)
    }


def row_of(bits: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(bits.astype(np.uint16).view(np.int16).copy()).view(torch.bfloat16)[None]


@pytest.mark.parametrize("finite", [1, 0])
def test_what_is_served_is_codes_times_scales_and_else_the_source(finite):
    text = TWO_SERVED.value
    for amax in AMAXES:
        bits = magnitudes_to(amax)
        bits = bits[: len(bits) // 2 * 2]
        registers = constants(amax, len(bits) // 2, "$2", "$4", "$6")
        registers |= {
            "$1": bits[0::2] | bits[1::2] << 16,
            "$8": np.full(len(bits) // 2, finite, np.uint32),
        }
        word = ptx.run(text, registers)["$0"]
        found = np.stack([word & 0xFFFF, word >> 16], 1).reshape(-1)
        expected = through_fp8(row_of(bits), (1, len(bits)), backend="reference")
        wanted = expected.view(torch.int16).numpy().view(np.uint16)[0] if finite else bits
        assert np.array_equal(found, wanted), hex(amax)


def test_codes_are_the_reference_s_four_to_a_word():
    text = FOUR_CODES.value
    for amax in AMAXES:
        bits = magnitudes_to(amax)
        bits = bits[: len(bits) // 4 * 4]
        registers = constants(amax, len(bits) // 4, "$3", "$7")
        registers |= {
            "$1": bits[0::4] | bits[1::4] << 16,
            "$2": bits[2::4] | bits[3::4] << 16,
        }
        found = ptx.run(text, registers)["$0"].view(np.uint8)
        # The row may have lost its amax: it is there once more, behind the rest.
        row = torch.cat([row_of(bits), row_of(np.array([amax]))], 1)
        codes, _ = quantize(row, (1, row.shape[1]), backend="reference")
        assert np.array_equal(found, codes.view(torch.uint8).numpy()[0, :-1]), hex(amax)
