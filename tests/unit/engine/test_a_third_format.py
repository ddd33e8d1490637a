"""A format that no server has, in this one file: what holds of the two that are served holds of it.

Scales of 64×64 blocks, under a name of their own; a layer without SGLang's kernels.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("sglang")
from sglang.srt.distributed import parallel_state
from support.replayed import replay_of

from sglang_fp8rl.config import Options
from sglang_fp8rl.engine.arrival.update import Origin, Update
from sglang_fp8rl.engine.modules.method import DecidedMethod
from sglang_fp8rl.engine.native import learned
from sglang_fp8rl.engine.plan.extension import Plan
from sglang_fp8rl.engine.proof.extension import Fingerprints, fingerprint_of_ranks
from sglang_fp8rl.engine.refit import ModelRefit
from sglang_fp8rl.errors import RefitError
from sglang_fp8rl.formats import FORMATS, Format
from sglang_fp8rl.lab.testing.cast_tables import table_of
from sglang_fp8rl.numerics import dequantize, quantize
from sglang_fp8rl.numerics.backends import has_kernel, is_there
from sglang_fp8rl.numerics.cast import cast_into
from sglang_fp8rl.numerics.write_table import Kind, Piece
from sglang_fp8rl.scheme import Cause, Scheme
from sglang_fp8rl.trainer import fingerprint_of, quantize_for_refit
from sglang_fp8rl.trainer.served_weights import compute_as_served
from sglang_fp8rl.wire.fingerprint import compare
from sglang_fp8rl.wire.plan import RefitPlan

BLOCK = (64, 64)


class Blocks64(Format):
    name = "blocks_of_64"
    block_size = BLOCK
    scale_suffix = "_scale_of_64"


class Reference(DecidedMethod):
    """The method of a served layer, whose kernel is the definition."""

    def __init__(self, held: Format) -> None:
        self.fp8rl_scheme, self.served = Scheme(held, Cause.ASKED, "a test"), None

    def reads_packed_scales(self, layer: Any) -> bool:
        return False


class Layer(nn.Module):
    """Rows of two sent tensors, or of one."""

    def __init__(self, rows: int, columns: int, held: Format) -> None:
        super().__init__()
        codes = torch.zeros(rows, columns).to(torch.float8_e4m3fn)
        self.weight = nn.Parameter(codes, requires_grad=False)
        scale = torch.full(held.grid((rows, columns)).scale_shape, torch.nan)
        setattr(self, held.scale_name("weight"), nn.Parameter(scale, requires_grad=False))
        self.quant_method = Reference(held)
        self.weight.weight_loader = _load_rows  # type: ignore[attr-defined]


def _load_rows(parameter: nn.Parameter, loaded: torch.Tensor, first: int = 0) -> None:
    parameter.data.narrow(0, first, loaded.shape[0]).copy_(loaded)


SHAPES = {"q.weight": (128, 200), "k.weight": (64, 200), "down.weight": (100, 130), "norm": (130,)}
PARTS = {"q.weight": 0, "k.weight": 128}


class Model(nn.Module):
    def __init__(self, held: Format) -> None:
        super().__init__()
        self.config = SimpleNamespace(model_type="toy")
        self.qk, self.down = Layer(192, 200, held), Layer(100, 130, held)
        self.norm = nn.Parameter(torch.zeros(130, dtype=torch.bfloat16), requires_grad=False)

    def load_weights(self, weights: Any) -> None:
        for name, tensor in weights:
            if name in PARTS:
                self.qk.weight.weight_loader(self.qk.weight, tensor, PARTS[name])
            elif name == "down.weight":
                self.down.weight.weight_loader(self.down.weight, tensor)
            else:
                self.norm.weight_loader(self.norm, tensor)


@pytest.fixture(autouse=True)
def _known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(FORMATS, Blocks64.name, Blocks64())
    for size in ("get_tensor_model_parallel_world_size", "get_moe_expert_parallel_world_size"):
        monkeypatch.setattr(parallel_state, size, lambda: 1)


def weights(seed: int) -> dict[str, torch.Tensor]:
    """FP32, of blocks that have other scales each."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(shape, generator=generator) * torch.logspace(-3, 1, shape[-1])
        for name, shape in SHAPES.items()
    }


class Server:
    """A model that was started on these weights."""

    def __init__(self, seed: int) -> None:
        held = FORMATS[Blocks64.name]
        self.model = Model(held)
        schemes = {name: Scheme(held, Cause.ASKED, "a test") for name in ("qk", "down")}
        self.refit = ModelRefit(self.model, Options(), schemes, list)
        self.refit.attach()
        with self.refit.during(Update(Origin.STARTUP)):
            self.model.load_weights(weights(seed).items())

    @property
    def plan(self) -> RefitPlan:
        return Plan(self.refit).made

    def update(self, *buckets: Any) -> Server:
        for at, bucket in enumerate(buckets):
            is_last = at == len(buckets) - 1
            with self.refit.during(Update(Origin.TENSOR, is_last_call=is_last)):
                self.model.load_weights(list(bucket))
        return self

    def bytes(self) -> dict[str, torch.Tensor]:
        return {
            name: one.data.reshape(-1).view(torch.uint8).clone()
            for name, one in self.model.named_parameters()
        }


def assert_same(server: Server, other: Server) -> None:
    found, expected = server.bytes(), other.bytes()
    assert found.keys() == expected.keys()
    for name, one in expected.items():
        assert torch.equal(found[name], one), name


def in_buckets(tensors: Any) -> list[list[tuple[str, torch.Tensor]]]:
    pairs = list(dict(tensors).items())
    return [pairs[3:], pairs[1:3], pairs[:1]]


def test_a_write_that_cuts_a_block_is_refused_by_the_name_that_came_each_time(monkeypatch):
    monkeypatch.setattr(learned, "_LAYERS", (__name__,))
    server, part = Server(0), weights(1)["k.weight"]
    weight, before = server.model.qk.weight, server.bytes()
    server.refit._load_weights = lambda sent: [weight.weight_loader(weight, x, 32) for _, x in sent]
    for _ in range(4):  # from the second time on its loader is known
        with pytest.raises(RefitError, match="no scale is its alone") as found:
            server.update([("k.weight", part)])
        assert found.value.subject == "k.weight"
    assert all(torch.equal(one, before[name]) for name, one in server.bytes().items())


def test_a_cast_is_the_reference_s():
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        source = weights(3)["down.weight"].to(dtype)
        expected, scale = quantize(source, BLOCK, backend="reference")
        codes, found = torch.empty_like(expected), torch.empty_like(scale)
        assert not cast_into(source, codes, found, BLOCK).any()
        assert torch.equal(codes.view(torch.uint8), expected.view(torch.uint8))
        assert torch.equal(found, scale)


def test_a_start_and_a_refit_in_any_buckets_store_the_definition_s_bytes():
    server = Server(0).update(*in_buckets(weights(1)))
    assert_same(server, Server(1))
    for name, layer, rows in (
        ("q.weight", server.model.qk, slice(0, 128)),
        ("k.weight", server.model.qk, slice(128, 192)),
        ("down.weight", server.model.down, slice(0, 100)),
    ):
        codes, scale = quantize(weights(1)[name], BLOCK, backend="reference")
        blocks = slice(rows.start // 64, -(-rows.stop // 64))
        assert torch.equal(layer.weight[rows].view(torch.uint8), codes.view(torch.uint8))
        assert torch.equal(layer.weight_scale_of_64[blocks], scale)


def test_addresses_stay_and_a_block_with_a_nan_keeps_its_bytes():
    server = Server(0)
    before = [one.data_ptr() for one in server.model.parameters()]
    kept, bad = server.bytes()["down.weight"].view(100, 130), weights(1)
    bad["down.weight"][70, 64] = torch.nan
    with pytest.raises(RefitError, match=r"down\.weight: NaN or Inf in 1 of 6 block"):
        server.update(bad.items())
    assert [one.data_ptr() for one in server.model.parameters()] == before
    found = server.bytes()["down.weight"].view(100, 130)
    assert torch.equal(found[64:, 64:128], kept[64:, 64:128])
    assert not torch.equal(found[:64], kept[:64])


def test_what_the_trainer_quantizes_is_taken_and_gives_the_same_bytes():
    server = Server(0)
    sent = dict(quantize_for_refit(weights(1).items(), server.plan))
    assert sent["k.weight_scale_of_64"].shape == (1, 4)
    assert_same(server.update(sent.items()), Server(1))


def test_a_scale_of_other_blocks_is_refused_by_name():
    server = Server(0)
    sent = dict(quantize_for_refit(weights(1).items(), server.plan))
    sent["q.weight_scale_of_64"] = torch.ones(1, 2)
    before = server.bytes()
    with pytest.raises(RefitError, match=r"q\.weight_scale_of_64: .*\(1, 2\).*shape \(2, 4\)"):
        server.update(sent.items())
    assert torch.equal(server.bytes()["qk.weight"][: 128 * 200], before["qk.weight"][: 128 * 200])


def test_a_write_that_cuts_a_block_is_refused():
    server, part = Server(0), weights(1)["k.weight"]
    loader = server.model.qk.weight.weight_loader
    server.model.load_weights = server.refit.load_weights
    server.refit._load_weights = lambda sent: [
        loader(server.model.qk.weight, tensor, 32) for _, tensor in sent
    ]
    with pytest.raises(RefitError, match=r"k\.weight.*inside a block of \[64, 64\]"):
        server.update([("k.weight", part)])


def test_its_plan_says_all_that_a_trainer_needs():
    plan = Server(0).plan
    entry = plan.of("down.weight")
    assert (entry.scheme, entry.dtype) == ("blocks_of_64", "float8_e4m3fn")
    assert (entry.scale_name, entry.scale_shape) == ("down.weight_scale_of_64", (2, 3))
    assert entry.block_size == BLOCK
    assert plan.modules["qk"].scheme == "blocks_of_64"
    assert plan.of("norm").block_size is None


@pytest.mark.parametrize("is_quantized", [False, True])
def test_the_fingerprint_of_what_is_served_is_the_trainer_s(is_quantized):
    server = Server(0).update(*in_buckets(weights(1)))
    plan = server.plan
    found = fingerprint_of_ranks([Fingerprints(server.refit).rank()])
    sent = quantize_for_refit(weights(1).items(), plan) if is_quantized else weights(1).items()
    expected = fingerprint_of(sent, plan)
    assert {one.form for one in found.numbers.values()} == {"float8_e4m3fn[64,64]", "bfloat16"}
    compared = compare(found, expected)
    assert compared.ok
    assert compared.compared == len(SHAPES)
    assert not compare(found, fingerprint_of(weights(2).items(), plan)).ok


@pytest.mark.parametrize("is_quantized", [False, True])
def test_later_updates_are_replayed_with_the_same_bytes_where_kernels_take_any_block(is_quantized):
    server = Server(0)
    for seed in (1, 2, 3):
        sent = weights(seed).items()
        server.update(quantize_for_refit(sent, server.plan) if is_quantized else sent)
    assert_same(server, Server(3))
    counts = replay_of(server.refit).counts
    if is_there("numba"):
        assert (counts.native_calls, counts.calls, counts.native_reasons) == (1, 2, {})
    else:
        assert set(counts.native_reasons) == {"this device has no kernels to write it with"}


def test_a_gpu_s_table_says_that_it_has_no_kernels_for_such_blocks():
    pytest.importorskip("triton")
    source, cuda = torch.randn(128, 128), torch.device("cuda")
    for block, is_there_one in (
        (BLOCK, False),
        ((128, 128), True),
        ((1, 128), True),
        ((1, 64), False),
    ):
        codes, scales = quantize(source, block, backend="reference")
        pieces = table_of([((0, 0), Piece(source, codes, scales, block, Kind.CAST))]).pieces
        blocks = pieces["block_n"], pieces["block_k"]
        assert has_kernel(cuda, blocks, pieces["cols"]) is is_there_one
        assert has_kernel(cuda, block, 128) is is_there_one


def test_a_trainer_s_model_computes_as_it_is_served():
    plan = Server(0).plan
    trained = nn.ModuleDict({
        "q": nn.Linear(200, 128, bias=False),
        "k": nn.Linear(200, 64, bias=False),
        "down": nn.Linear(130, 100, bias=False),
    })  # fmt: skip
    assert compute_as_served(trained, plan) == ["q", "k", "down"]
    x = torch.randn(3, 130)
    codes, scale = quantize(trained["down"].weight.detach(), BLOCK, backend="reference")
    weight = dequantize(codes, scale, BLOCK).float()
    assert torch.equal(trained["down"](x), nn.functional.linear(x, weight))
