"""A product with a reciprocal in two parts gives the code of the quotient: a share of all cases.

All of them: `make proof`.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

pytest.importorskip("numba")

from support.numerics import packed_quotient


@pytest.mark.parametrize("pow2_scale", [False, True])
def test_a_two_part_reciprocal_gives_the_code_of_the_quotient(pow2_scale):
    # Where FP32 leaves its normal range, and of the rest one of 40, each mantissa among them.
    ends = np.concatenate([np.arange(1, 0x0480), np.arange(packed_quotient.INF - 0x10, 0x7F80)])
    between = np.arange(0x0480, packed_quotient.INF - 0x10, 41)
    assert set((between & 0x7F).tolist()) == set(range(128))
    pairs, wrong = packed_quotient.wrong_codes(np.concatenate([ends, between]), pow2_scale)
    assert pairs > 12_000_000
    assert wrong == 0


def test_a_single_product_would_not_do():
    """The cases can tell: one rounding too many shows."""
    wrong = 0
    for amax in range(0x3F80, 0x4000):
        scale = torch.tensor(packed_quotient.scale_inv(np.uint32(amax), False))
        x = (torch.arange(0x3B00, amax + 1, dtype=torch.int32) << 16).view(torch.float32)
        one, other = (x / scale).to(torch.float8_e4m3fn), (x * (1 / scale)).to(torch.float8_e4m3fn)
        wrong += int((one.view(torch.uint8) != other.view(torch.uint8)).sum())
    assert wrong > 0


def test_the_proof_encodes_as_torch_does():
    bits = np.arange(0, 0x43E1_0000, 0x155, np.uint32)
    beside = np.array([0x3C80, 0x3C88, 0x4300, 0x43D8], np.uint32)[:, None] << np.uint32(16)
    bits = np.concatenate([bits, (beside + np.arange(-2, 3)).astype(np.uint32).ravel()])
    values = np.concatenate([bits.view(np.float32), -bits.view(np.float32)])
    ours = np.array([packed_quotient.encode(x) for x in values[::97]], np.uint8)
    expected = torch.from_numpy(values[::97].copy()).clamp(-448, 448).to(torch.float8_e4m3fn)
    assert torch.equal(torch.from_numpy(ours), expected.view(torch.uint8))
