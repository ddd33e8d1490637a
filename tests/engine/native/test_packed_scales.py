"""Where scales are served as exponents: those are always of the weights that kernels read, folded or not,
and a pair whose scales are none is refused before it is stored."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from support.by_definition import quantize_blockwise
from support.engine.commands import begin, digests, end, model_of, status
from support.engine.fingerprint_commands import fingerprint
from support.engine.kv_commands import fold_at_random, fold_of, unfold
from support.engine.options import plain_experts
from support.engine.pool import needs_sessions, on

from sglang_fp8rl.engine.kv_scales import extension

pytestmark = [pytest.mark.engine, on(plain_experts("tp1"))]

LINEAR = "model.layers.1.self_attn.o_proj.weight"
EXPERT = "model.layers.1.mlp.experts.1.down_proj.weight"
STORED_IN = {LINEAR: LINEAR, EXPERT: "model.layers.1.mlp.experts.w2_weight"}


def blockwise_of(scheduler: Any) -> list[Any]:
    targets = model_of(scheduler).fp8rl_refit.targets.values()
    return [one for one in targets if one.is_fp8]


def serve_packed(scheduler: Any) -> None:
    """As on a GPU whose DeepGEMM reads exponents; the CPU's kernels could not run on them."""
    for target in blockwise_of(scheduler):
        vars(target).pop("takes_packed_scales", None)
        method = target.module.quant_method
        method.reads_packed_scales = lambda _: True
        method.derive(target.module)


def serve_plain(scheduler: Any) -> None:
    for target in blockwise_of(scheduler):
        vars(target).pop("takes_packed_scales", None)
        method = target.module.quant_method
        vars(method).pop("reads_packed_scales", None)
        method.served = None


def is_packed_as_stored(scheduler: Any) -> bool:
    """Whether the packed scales are those of the scales that are stored, in every layer."""
    from sglang_fp8rl.engine.modules.method import pack

    return all(
        torch.equal(
            getattr(one.module.quant_method.served, f"{one.name.rpartition('.')[2]}_scale_inv"),
            pack(one.scale.data, one.parameter.shape[-2], one.name),
        )
        for one in blockwise_of(scheduler)
    )


@pytest.fixture
def packed_host(host):
    host.call(serve_packed)
    yield host
    host.call(serve_plain)


def pairs(model, factor, plain=""):
    """FP8 weights with scales that are powers of two, but for one."""
    sent = []
    for name in STORED_IN:
        codes, scale = quantize_blockwise(factor * model.second[name], pow2_scale=name != plain)
        sent += [(name, codes), (f"{name}_scale_inv", scale)]
    return sent


@pytest.mark.parametrize("name", [LINEAR, EXPERT])
@pytest.mark.parametrize("is_replayed", [False, True], ids=["native", "replayed"])
def test_a_scale_that_is_no_power_of_two_is_refused_with_its_codes(packed_host, name, is_replayed):
    host = packed_host
    if is_replayed:
        for _ in range(2):
            host.send(pairs(host.model, 1))
        assert host.call(status)["replay"]["calls"] == 1
    before = host.call(digests)
    words = (f"{name}_scale_inv", "power of two", "use_weight_pow2_scale")
    host.refuses(pairs(host.model, 8, plain=name), *words)
    after = host.call(digests)
    for leaf in (STORED_IN[name], f"{STORED_IN[name]}_scale_inv"):
        assert after[leaf] == before[leaf]
    assert host.call(is_packed_as_stored)
    assert any(name in line for line in host.call(status)["last_refit"]["errors"])
    host.send(pairs(host.model, 8))  # it goes on
    assert (
        host.call(digests)[STORED_IN[name] + "_scale_inv"] != before[f"{STORED_IN[name]}_scale_inv"]
    )
    assert host.call(is_packed_as_stored)


@needs_sessions
def test_the_next_session_ends_after_a_scale_that_is_no_power_of_two(packed_host):
    """The end of a session processes all weights again."""
    host = packed_host
    host.call(begin)
    host.refuses(pairs(host.model, 8, plain=LINEAR))
    host.call(end)
    assert host.call(status)["state"] == "failed"
    host.call(begin)
    host.update_to("first")
    assert host.call(end)[0]
    state = host.call(status)
    assert state["consistent"], state["problems"]
    assert host.call(is_packed_as_stored)


def ask_for_the_fingerprint(scheduler: Any) -> dict[str, Any]:
    """As `GET /fp8rl/fingerprint` does."""
    return fingerprint(scheduler).as_dict()


def choose_by_a_text(scheduler: Any) -> list[bool]:
    """`kv_scales: calibrated` chooses: whether the packed scales are those stored while the text runs,
    and afterwards. The text itself can't run, for no kernel of a CPU reads packed scales."""
    kv, found = extension.KvScaling(model_of(scheduler).fp8rl_refit), []
    kv.fold = fold_of(scheduler)

    def largest(model: Any, tokens: Any, layers: Any) -> torch.Tensor:
        found.append(is_packed_as_stored(scheduler))
        return torch.ones(len(layers), 2, dtype=torch.float64)

    kv.tokens = [0]
    with mock.patch.object(extension, "largest_of_text", largest):
        kv._table()
    return [*found, is_packed_as_stored(scheduler)]


@pytest.fixture
def folded_host(packed_host):
    packed_host.call(fold_at_random, 3)
    yield packed_host
    packed_host.call(unfold)


def test_a_fingerprint_leaves_the_scales_packed_that_are_served(packed_host):
    expected = packed_host.call(ask_for_the_fingerprint)
    packed_host.call(fold_at_random, 3)
    try:
        assert packed_host.call(is_packed_as_stored)
        for _ in range(2):
            assert packed_host.call(ask_for_the_fingerprint) == expected
            assert packed_host.call(is_packed_as_stored)
    finally:
        packed_host.call(unfold)


def test_a_text_runs_on_packed_scales_of_the_weights_that_it_runs_on(folded_host):
    assert folded_host.call(choose_by_a_text) == [True, True]


def test_an_update_packs_what_is_folded_again(folded_host):
    for _ in range(2):
        folded_host.send(list(folded_host.model.second.items()))
        assert folded_host.call(is_packed_as_stored)
