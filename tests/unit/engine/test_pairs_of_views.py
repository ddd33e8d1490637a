"""Codes and scales that a model cuts or turns before its loaders see them are stored as a matrix has them."""

from __future__ import annotations

import pytest
import torch
from torch import nn

pytest.importorskip("sglang")
from support.by_definition import quantize_blockwise

from sglang_fp8rl.engine.arrival.update import Origin, Update
from sglang_fp8rl.engine.modules.linear import Fp8BlockwiseOnlineLinearMethod
from sglang_fp8rl.engine.native.pairs import Half
from sglang_fp8rl.errors import RefitError
from sglang_fp8rl.scheme import decide_scheme
from tools.census.toys.toy import attached

PART = 256  # rows, and this rank's columns, of each matrix


class Matrix(nn.Module):
    """The columns that one of two ranks holds of a matrix."""

    def __init__(self, rank: int, *, copies: bool = False) -> None:
        super().__init__()
        self.quant_method = method = object.__new__(Fp8BlockwiseOnlineLinearMethod)
        method.fp8rl_scheme = decide_scheme("", "per_channel", "blockwise")
        method.served = method.w8a8_block_fp8_linear = None
        codes, scale = torch.zeros(PART, PART, dtype=torch.float8_e4m3fn), torch.ones(2, 2)
        self.weight = nn.Parameter(codes, requires_grad=False)
        self.weight_scale_inv = nn.Parameter(scale, requires_grad=False)

        def load(parameter: torch.Tensor, loaded: torch.Tensor) -> None:
            own = loaded.narrow(1, rank * PART, PART)
            parameter.data.copy_(own.contiguous() if copies else own)

        self.weight.weight_loader = load


class Fused(nn.Module):
    """Two matrices that are sent as one, side by side or turned."""

    def __init__(self, rank: int, is_turned: bool = False, copies: bool = False) -> None:
        super().__init__()
        self.a, self.b = Matrix(rank, copies=copies), Matrix(rank, copies=copies)
        self.is_turned = is_turned

    def load_weights(self, weights) -> None:
        for _, tensor in weights:
            whole = tensor.t() if self.is_turned else tensor
            for module, part in zip((self.a, self.b), whole.chunk(2, dim=1), strict=True):
                module.weight.weight_loader(module.weight, part)


def sent(seed: int, is_turned: bool) -> tuple[list, torch.Tensor, torch.Tensor]:
    """The pair as it is sent, and its codes and scales as the matrices have them side by side."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(PART, 4 * PART, generator=generator) * torch.logspace(-3, 1, 4 * PART)
    codes, scale = quantize_blockwise(weight)
    pair = [
        (name, one.t().contiguous() if is_turned else one)
        for name, one in (("fused.weight", codes), ("fused.weight_scale_inv", scale))
    ]
    return pair, codes, scale


@pytest.mark.parametrize("is_apart", [False, True], ids=["one call", "two calls"])
@pytest.mark.parametrize("is_turned", [False, True], ids=["side by side", "turned"])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_part_has_the_codes_and_the_scales_of_its_columns(rank, is_turned, is_apart):
    model = Fused(rank, is_turned)
    refit = attached(model)
    for seed in range(3):
        pair, *_ = sent(seed, is_turned)
        for bucket in [[one] for one in pair] if is_apart else [pair]:
            with refit.during(Update(Origin.TENSOR, in_session=True)):
                model.load_weights(bucket)
            for _, tensor in bucket if is_apart else ():
                tensor.view(torch.uint8).zero_()  # the sender takes its memory back
        _, codes, scale = sent(seed, is_turned)
        for at, module in enumerate((model.a, model.b)):
            first = (2 * at + rank) * PART
            expected = codes[:, first : first + PART]
            assert torch.equal(module.weight.view(torch.uint8), expected.view(torch.uint8))
            blocks = slice(first // 128, (first + PART) // 128)
            assert torch.equal(module.weight_scale_inv, scale[:, blocks])


@pytest.mark.parametrize("is_apart", [False, True], ids=["one call", "two calls"])
@pytest.mark.parametrize("rank", [0, 1])
def test_codes_that_a_loader_copies_are_refused_before_a_byte_is_stored(rank, is_apart):
    """Which of the scales belong to a copy is not known."""
    model = Fused(rank, copies=True)
    refit = attached(model)
    pair, *_ = sent(0, False)
    with (
        pytest.raises(RefitError, match=r"fused\.weight: .*plain block"),
        refit.during(Update(Origin.TENSOR, in_session=True)),
    ):
        model.load_weights(pair[:1] if is_apart else pair)
    for module in (model.a, model.b):
        assert not module.weight.view(torch.uint8).any()
        assert torch.equal(module.weight_scale_inv, torch.ones(2, 2))


class Alone(Fused):
    """One matrix, whose tensors reach its loader as they are sent."""

    def load_weights(self, weights) -> None:
        for _, tensor in weights:
            self.a.weight.weight_loader(self.a.weight, tensor)


def in_one_memory(pair):
    """A checkpoint as `runai_streamer` reads it: each tensor where the one before was."""
    memory = torch.empty(max(one.nbytes for _, one in pair), dtype=torch.uint8)
    for name, one in pair:
        lent = memory[: one.nbytes].view(one.dtype).view(one.shape)
        lent.view(torch.uint8).copy_(one.view(torch.uint8))
        yield name, lent
        memory.fill_(1)


@pytest.mark.parametrize("origin", [Origin.STARTUP, Origin.DISK])
@pytest.mark.parametrize("is_scale_first", [False, True])
def test_half_of_a_pair_outlives_its_memory_while_a_checkpoint_streams(origin, is_scale_first):
    model = Alone(0)
    refit = attached(model)
    pair, codes, scale = sent(0, False)
    with refit.during(Update(origin)):
        model.load_weights(in_one_memory(pair[::-1] if is_scale_first else pair))
    assert torch.equal(model.a.weight.view(torch.uint8), codes[:, :PART].view(torch.uint8))
    assert torch.equal(model.a.weight_scale_inv, scale[:, :2])


def test_a_call_waits_for_the_device_behind_the_last_that_reads_what_was_sent(monkeypatch):
    """A half that is kept is copied, and the device has read it, before the sender is answered."""
    model, done = Alone(0), []
    refit = attached(model)
    keep = Half.keep
    monkeypatch.setattr(Half, "keep", lambda half: (done.append("copy"), keep(half)))
    monkeypatch.setattr(refit, "wait_for_device", lambda: done.append("wait"))
    for one in sent(0, False)[0]:
        with refit.during(Update(Origin.TENSOR, in_session=True)):
            model.load_weights([one])
    assert done == ["copy", "wait", "wait"]
    with refit.during(Update(Origin.TENSOR, in_session=True)):
        model.load_weights([])
    assert done[3:] == ["wait"]
