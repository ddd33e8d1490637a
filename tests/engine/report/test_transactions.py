"""A refit on a real engine: what it left out is told by name, and a full one clears everything."""

from __future__ import annotations

import pytest
import torch
from support.by_definition import quantize_blockwise
from support.engine.commands import (
    begin,
    digests,
    end,
    model_of,
    parameter,
    status,
    update,
    update_from_disk,
)
from support.engine.models import MODELS
from support.engine.pool import needs_sessions, on

from sglang_fp8rl.engine.law.law import law_of
from sglang_fp8rl.lab.testing.checkpoints import save_checkpoint
from sglang_fp8rl.wire.refit_note import RefitNote, apart_from_versions

pytestmark = [pytest.mark.engine, on("qwen3-tp1")]

MODEL = MODELS["qwen3"]
DOWN = "model.layers.0.mlp.down_proj.weight"
NORM = "model.norm.weight"
SECOND = list(MODEL.second.items())
NORMS = [name for name in MODEL.second if "norm" in name]


def left_out(state):
    return set(state["last_refit"]["missing_names"])


def without(*names):
    return [(name, tensor) for name, tensor in SECOND if name not in names]


def test_a_refit_of_every_fp8_weight_and_no_norm_is_mixed(host):
    first, *rest = without(*NORMS)
    assert host.call(update, [first], None, False)[0]
    success, message = host.call(update, rest)
    assert success
    assert NORMS[0] in message
    state = host.call(status)
    assert (state["state"], state["last_refit"]["outcome"]) == ("mixed", "mixed")
    assert left_out(state) == set(NORMS)
    assert state["last_refit"]["missing"] == len(NORMS)
    assert any(NORMS[0] in line for line in state["problems"])
    assert [row["parameters"] for row in state["served"]][1] == len(NORMS)


def test_the_norms_of_another_refit_do_not_make_it_whole(host):
    first, *rest = without(*NORMS)
    assert host.call(update, [first], None, False)[0]
    assert host.call(update, rest)[0]
    assert host.call(update, [(name, MODEL.second[name]) for name in NORMS])[0]
    assert host.call_all(digests) == host.fresh("second").digests
    assert host.call(status)["state"] == "mixed"


def test_a_version_goes_with_its_refit(host):
    host.send(SECOND, weight_version="step-7")
    state = host.call(status)
    assert state["last_refit"]["version"] == "step-7"
    assert state["last_complete_refit"]["version"] == "step-7"
    assert [row["version"] for row in state["served"]] == ["step-7"]


# -- announced -------------------------------------------------------------------------------------


def note(**fields):
    return RefitNote("test", **fields).to_text()


def test_all_that_the_plan_lists_may_be_announced(host):
    host.refuses(without(NORM), NORM, rid=note(extent="all"))
    host.send(SECOND, rid=note(extent="all"))
    assert host.call(status)["state"] == "whole"


def test_another_client_s_unreadable_request_leaves_waiting_halves_alone(host):
    """Two halves of a pair under one name, and between them somebody's call that names a tensor twice."""
    mine = {"rid": note(extent="partial")}
    codes, scale = quantize_blockwise(MODEL.second[DOWN])
    host.send([(DOWN, codes)], flush_cache=False, **mine)
    host.refuses([(NORM, MODEL.second[NORM])] * 2)
    host.send([(f"{DOWN}_scale_inv", scale)], **mine)
    assert torch.equal(host.call(parameter, DOWN), codes.view(torch.uint8))


# -- sessions --------------------------------------------------------------------------------------


@needs_sessions
@pytest.mark.parametrize("is_announced", [True, False])
def test_a_session_names_what_it_left_out_and_fails_if_all_was_announced(host, is_announced):
    assert host.call(begin, rid=note(extent="all") if is_announced else None)[0]
    host.send(without(NORM))
    assert host.call(status)["state"] == "open"
    success, message = host.call(end)
    assert success is not is_announced
    assert NORM in message
    assert host.call(status)["state"] == ("failed" if is_announced else "mixed")
    assert host.call(begin)[0]  # it is closed all the same
    assert host.call(end)[0]
    assert host.call(status)["state"] == ("failed" if is_announced else "mixed")


@needs_sessions
def test_a_session_that_ends_behind_a_failure_says_so_once_more(host):
    assert host.call(begin)[0]
    host.refuses([(DOWN, torch.ones(3, 3))])
    success, message = host.call(end)
    assert not success
    assert DOWN in message


@needs_sessions
def test_halves_that_were_left_behind_meet_no_half_of_the_next_refit(host):
    """A session outlived its sender; the scale of the next one would scale codes that are stale."""
    codes, _ = quantize_blockwise(MODEL.second[DOWN])
    _, scale = quantize_blockwise(MODEL.first[DOWN])
    assert host.call(begin)[0]
    host.send([(DOWN, codes)], flush_cache=False)
    host.refuses_and_keeps([(f"{DOWN}_scale_inv", scale)], rid=note(extent="all"))
    host.call(end)


# -- from disk -------------------------------------------------------------------------------------


@pytest.mark.parametrize("what", ["a layer", "a misspelt name"])
def test_a_checkpoint_that_lacks_something_is_no_success(host, checkpoint_dir, what):
    state = dict(MODEL.second)
    if what == "a layer":
        missing = {name for name in state if name.startswith("model.layers.1.")}
        state = {name: tensor for name, tensor in state.items() if name not in missing}
    else:
        missing = {DOWN}
        state[DOWN.replace("down_proj", "donw_proj")] = state.pop(DOWN)
    path = save_checkpoint(checkpoint_dir / what.replace(" ", "-"), MODEL.config, state)
    success, message = host.call(update_from_disk, str(path))
    assert not success
    found = host.call(status)
    assert found["state"] in ("mixed", "failed")
    assert left_out(found) == missing
    assert missing.pop() in message or what != "a layer"


# -- the cache -------------------------------------------------------------------------------------


def update_while_busy(scheduler, named_tensors):
    """As if requests were running: SGLang refuses its flush."""
    updater = scheduler.weight_updater
    flush, updater.flush_cache = updater.flush_cache, lambda **_: False
    try:
        return update(scheduler, named_tensors)
    finally:
        updater.flush_cache = flush


def flush_cache(scheduler):
    return scheduler.flush_cache()


def test_a_refused_flush_fails_no_refit(host):
    assert not host.call(update_while_busy, SECOND)[0]
    state = host.call(status)
    assert (state["state"], state["problems"]) == ("whole", [])
    last = state["last_refit"]
    assert (last["outcome"], last["complete"], last["cache_flushed"]) == ("ok", True, False)
    assert host.call_all(digests) == host.fresh("second").digests
    assert host.call(flush_cache)
    assert host.call(status)["last_refit"]["cache_flushed"]
    assert host.call(update, SECOND)[0]
    assert host.call(status)["last_refit"]["cache_flushed"]


# -- where it is decided ---------------------------------------------------------------------------


def refits_that_are_complete(scheduler, named_tensors):
    """How often `RefitLog.conclude` found one complete."""
    log = law_of(model_of(scheduler).fp8rl_refit).log
    conclude, found = log.conclude, []

    def counted(verdict, **how):
        refit = conclude(verdict, **how)
        found.append(refit is not None and refit.is_complete)
        return refit

    log.conclude = counted
    try:
        for bucket, flush in named_tensors:
            update(scheduler, bucket, None, flush)
    finally:
        del log.conclude
    return found


def test_a_refit_of_many_calls_is_decided_once(host):
    buckets = [(SECOND[:9], False), (SECOND[9:20], False), (SECOND[20:], True)]
    assert host.call(refits_that_are_complete, buckets) == [True]


@needs_sessions
@pytest.mark.parametrize("named", [False, True])
def test_a_session_and_its_calls_may_both_name_the_refit(host, named):
    assert host.call(begin, **({"rid": note(extent="all")} if named else {}))[0]
    for items, flush in ((SECOND[:5], False), (SECOND[5:], True)):
        assert host.call(update, items, None, flush, rid=note(extent="all", version="v2"))[0]
        assert host.call(status)["state"] == "open"
    assert host.call(end)[0]
    assert host.call(status)["state"] == "whole"
    assert host.call_all(digests) == host.fresh("second").digests


def test_a_name_that_looks_like_a_version_moves_none(host):
    for text in ('"evil"', "no JSON"):
        message = host.refuses([(f"x\x1ffp8rl-version:{text}\x1f", torch.ones(2))])
        assert apart_from_versions(message) == (message, [])
