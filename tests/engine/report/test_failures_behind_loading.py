"""What fails behind the loading of an update: told, in the status, and mended by the next full one."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace

import pytest
import torch
from support.engine.commands import begin, digests, end, model_of, status, update
from support.engine.models import MODELS
from support.engine.pool import needs_sessions, on

pytestmark = [pytest.mark.engine, on("qwen3-tp1", "qwen3-tp2")]

MODEL = MODELS["qwen3"]
SECOND = list(MODEL.second.items())
BREAKS = "packing broke"


@contextlib.contextmanager
def broken(owner, name):
    """A function that raises, on the last rank alone."""
    native = getattr(owner, name)

    def raises(*args, **kwargs):
        raise RuntimeError(BREAKS)

    is_last = torch.distributed.get_rank() == torch.distributed.get_world_size() - 1
    setattr(owner, name, raises if is_last else native)
    try:
        yield
    finally:
        setattr(owner, name, native)


def update_that_breaks_behind_it(scheduler, named_tensors, busy=False, **more):
    updater = scheduler.weight_updater
    flush = updater.flush_cache
    with broken(model_of(scheduler).fp8rl_refit.derived, "end_of_update"):
        updater.flush_cache = (lambda **_: False) if busy else flush
        try:
            return update(scheduler, named_tensors, **more)
        finally:
            updater.flush_cache = flush


def end_that_breaks(scheduler):
    with broken(type(scheduler.tp_worker.model_runner.weight_updater), "end_weight_update"):
        return end(scheduler)


def update_whose_session_breaks(scheduler, named_tensors):
    with broken(type(scheduler.tp_worker.model_runner.weight_updater), "end_weight_update"):
        return update(scheduler, named_tensors)


def assert_failed(host, answer):
    success, message = answer
    assert not success
    assert BREAKS in message
    for found in host.call_all(status):
        assert found["state"] == "failed"
        assert found["last_refit"]["outcome"] == "failed"
        assert any(BREAKS in text for text in found["last_refit"]["errors"])


@pytest.mark.parametrize("busy", [False, True], ids=["flushed", "flush refused"])
def test_a_complete_update_that_fails_behind_its_loading_is_no_success(host, busy):
    assert_failed(host, host.call(update_that_breaks_behind_it, SECOND, busy=busy))


def test_a_bucket_in_the_middle_of_an_update_fails_it_with_its_reason(host):
    host.send(SECOND[:9], flush_cache=False)
    assert_failed(host, host.call(update_that_breaks_behind_it, SECOND[9:20], flush_cache=False))


@needs_sessions
@pytest.mark.parametrize("items", [SECOND, []], ids=["full", "empty"])
def test_a_session_whose_end_breaks_is_over_and_failed(host, items):
    assert host.call(begin)[0]
    if items:
        host.send(items)
    assert_failed(host, host.call(end_that_breaks))
    assert host.call(begin)[0]
    host.send(SECOND)
    assert host.call(end)[0]
    assert host.call(status)["state"] == "whole"


@needs_sessions
def test_a_call_whose_own_session_breaks_at_its_end_is_failed_too(host):
    assert_failed(host, host.call(update_whose_session_breaks, SECOND))


# -- what checkpoint-engine's update binds anew ------------------------------------------------------


def update_by_ipc(scheduler, named_tensors):
    """The hook around SGLang's own, whose worker loads and then lets the model derive."""
    from sglang.srt.managers.io_struct import UpdateWeightsFromIPCReqOutput

    from sglang_fp8rl.engine.arrival.update import Origin
    from sglang_fp8rl.engine.host.update_request import answer_update

    model = model_of(scheduler)
    model.derived_in_test = torch.zeros(3)
    before = model.derived_in_test.data_ptr()

    manager = scheduler.weight_updater

    def original(request):
        model.load_weights(named_tensors)
        model.derived_in_test = torch.full((3,), 7.0)
        torch.distributed.barrier(group=manager.tp_cpu_group)
        return UpdateWeightsFromIPCReqOutput(success=True, message="")

    host = SimpleNamespace(update_weights_from_ipc=original)
    request = SimpleNamespace(flush_cache=True, rid=None)
    try:
        result = answer_update(Origin.IPC, host, manager, request)
        return result.success, before == model.derived_in_test.data_ptr(), model.derived_in_test
    finally:
        del model.derived_in_test


def test_what_a_worker_binds_anew_behind_ipc_keeps_its_address(host):
    success, is_in_place, value = host.call(update_by_ipc, SECOND)
    assert success
    assert is_in_place
    assert value.tolist() == [7.0] * 3
    assert host.call_all(digests) == host.fresh("second").digests
