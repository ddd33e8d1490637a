"""After any sequence of deltas the bytes are those of a fresh server, or the call says why not."""

from __future__ import annotations

import pytest
import torch
from _served import Client, served, weights
from commands import addresses, digests, status, update
from engine_host import EngineHost
from models import MODELS, checkpoint
from trainer_commands import plan

from sglang_fp8rl.delta_format import DELTA_SUFFIX, FULL_REFIT_WANTED
from sglang_fp8rl.errors import RefitError
from sglang_fp8rl.refit_plan import RefitPlan
from sglang_fp8rl.trainer import SentState, WireStats, quantize_for_refit
from sglang_fp8rl.trainer.delta import only_changed

pytestmark = pytest.mark.engine

CASES = [
    ("qwen3", 1),
    ("qwen3", 2),
    ("llama-misaligned", 1),
    ("qwen3-moe", 2),
    ("qwen3-one-kv-head", 2),
    ("deepseek-v3", 1),
    ("phi3", 1),
]


@pytest.fixture(scope="module", params=CASES, ids=lambda case: f"{case[0]}-tp{case[1]}")
def case(request, checkpoint_dir):
    name, tp_size = request.param
    model = MODELS[name]
    with EngineHost(checkpoint(checkpoint_dir, model, "first"), tp_size=tp_size) as host:
        yield model, host, RefitPlan.from_dict(host.call(plan))


def nudged(state, seed: int, share: float = 0.3):
    """A few values of some tensors move, as in a small step of training."""
    generator = torch.Generator().manual_seed(seed)
    result = {}
    for name, weight in state.items():
        moved = weight.clone()
        if torch.rand((), generator=generator) < share:
            places = torch.randint(0, weight.numel(), (3,), generator=generator)
            moved.view(-1)[places] *= 1.5
        result[name] = moved
    return result


def send(host, items):
    for success, message in host.call_all(update, items):
        assert success, message


def test_any_sequence_of_deltas_gives_the_bytes_of_a_full_refit(case):
    model, host, found = case
    state, weights_now, before = SentState(), model.first, host.call_all(addresses)
    send(host, list(quantize_for_refit(weights_now.items(), found, since=state)))
    state.commit()
    for step in range(4):
        # Back to the start in between, and one step in which nothing changes.
        weights_now = model.first if step == 2 else nudged(weights_now, step, share=step % 3 / 3)
        stats = WireStats()
        items = list(quantize_for_refit(weights_now.items(), found, since=state, stats=stats))
        assert any(name.endswith(DELTA_SUFFIX) for name, _ in items)
        send(host, items[: len(items) // 2])
        send(host, items[len(items) // 2 :])
        state.commit()
        by_delta = host.call_all(digests)
        report = host.call(status)
        assert report["consistent"], report["problems"]
        assert report["last_refit"]["complete"]
        send(host, list(weights_now.items()))
        assert host.call_all(digests) == by_delta
    assert host.call_all(addresses) == before
    assert stats.nbytes < stats.nbytes_bf16


def test_a_delta_to_other_weights_is_refused_and_writes_nothing_of_them(case):
    model, host, found = case
    state = SentState()
    send(host, list(quantize_for_refit(model.first.items(), found, since=state)))
    state.commit()
    send(host, list(model.second.items()))  # somebody else
    before = host.call_all(digests)
    changed = nudged(model.first, 5, share=1.0)
    deltas = [
        item
        for item in quantize_for_refit(changed.items(), found, since=state)
        if item[0].endswith(DELTA_SUFFIX)
    ]
    assert deltas
    for success, message in host.call_all(update, deltas):
        assert not success
        assert FULL_REFIT_WANTED in message
        assert deltas[0][0].removesuffix(DELTA_SUFFIX) in message
    assert host.call_all(digests) == before
    assert host.call(status)["last_refit"]["outcome"] == "failed"
    state.forget()
    send(host, list(quantize_for_refit(changed.items(), found, since=state)))
    assert host.call(status)["consistent"]
    send(host, list(model.first.items()))


def test_a_bit_that_fell_over_on_the_way_is_found(case):
    model, host, found = case
    state = SentState()
    send(host, list(quantize_for_refit(model.first.items(), found, since=state)))
    state.commit()
    before = host.call_all(digests)
    changed = nudged(model.first, 7, share=1.0)
    name, packed = next(
        item
        for item in quantize_for_refit(changed.items(), found, since=state)
        if item[0].endswith(DELTA_SUFFIX)
    )
    packed[-1] ^= 1
    for success, message in host.call_all(update, [(name, packed)]):
        assert not success
        assert "do not have the digest" in message
    assert host.call_all(digests) == before
    send(host, list(model.first.items()))


@pytest.mark.parametrize("spoiled", ["code", "scale"])
def test_a_delta_with_what_is_no_number_is_refused(case, spoiled):
    """Its digests are right: the trainer itself made it so."""
    model, host, found = case
    state = SentState()
    send(host, list(quantize_for_refit(model.first.items(), found, since=state)))
    state.commit()
    before = host.call_all(digests)
    items = list(quantize_for_refit(model.first.items(), found))
    codes = [one for one in items if one[1].dtype == torch.float8_e4m3fn]
    name, largest = max(codes, key=lambda one: one[1].numel())
    if spoiled == "code":
        largest.view(torch.uint8)[0, 0] = 0x7F
    else:
        dict(items)[found.of(name).scale_name].view(-1)[0] = 0
    deltas = [one for one in only_changed(items, found, state) if one[0] == name + DELTA_SUFFIX]
    for success, message in host.call_all(update, deltas):
        assert not success
        assert {"code": "0x7F or 0xFF", "scale": "positive finite"}[spoiled] in message
        assert name in message
    assert host.call_all(digests) == before
    send(host, list(model.first.items()))


def test_a_delta_for_what_is_not_fp8_is_refused(case):
    _, host, _ = case
    norm = "model.norm.weight" + DELTA_SUFFIX
    for name in (norm, "no.such.weight" + DELTA_SUFFIX):
        for success, message in host.call_all(update, [(name, torch.zeros(32, dtype=torch.uint8))]):
            assert not success
            assert "not FP8 on the wire" in message


# -- over HTTP ------------------------------------------------------------------------------------


@pytest.fixture
def running(server, checkpoint_dir):
    return served(server, checkpoint_dir)


def test_over_http_outputs_are_those_of_a_fresh_server_and_a_restart_is_noticed(running):
    client: Client = running.client
    found, state = client.plan(), SentState()
    sent = client.update_changed(lambda: weights("first"), found, state)
    again = client.update_changed(lambda: weights("first"), found, state)
    assert again.nbytes < sent.nbytes
    running.check("first")
    client.update_changed(lambda: weights("second"), found, state)
    running.check("second")
    client.update(weights("first"))  # behind the state's back
    changed = nudged(dict(weights("second")), 3, share=1.0)
    with pytest.raises(RefitError, match=FULL_REFIT_WANTED):
        client.update_changed(lambda: changed.items(), found, state)
    client.update_changed(lambda: weights("second"), found, state, full_on_mismatch=True)
    running.check("second")
    client.update_changed(lambda: weights("first"), found, state)
    running.check("first")
