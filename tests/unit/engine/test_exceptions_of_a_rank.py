"""One rank's exceptions are in every rank's answer, and no rank waits for another."""

from __future__ import annotations

import argparse
from contextlib import ExitStack
from types import SimpleNamespace

import pytest
import torch
from sglang.srt.server_args import ServerArgs
from support.threads_as_ranks import Ranks

from sglang_fp8rl.engine.host import arguments
from sglang_fp8rl.engine.host.boundary import Boundary
from sglang_fp8rl.engine.host.update_request import check_weights_are_there
from sglang_fp8rl.engine.kv_scales import choice
from sglang_fp8rl.engine.refit import wait_for
from sglang_fp8rl.errors import ConfigError, HostError, RefitError

RANKS = 3


@pytest.fixture
def ranks(monkeypatch):
    return Ranks(RANKS, monkeypatch)


def broken():
    raise KeyError("a key")


@pytest.mark.parametrize("bad", range(RANKS))
def test_what_one_rank_raises_all_of_them_say(ranks, bad):
    def act(rank):
        boundary = Boundary(ranks.groups[rank])
        boundary.step(broken if rank == bad else int)
        return boundary.is_fine(), boundary.failures()

    for rank, (is_fine, failures) in enumerate(ranks.call(act)):
        assert not is_fine
        prefix = "" if rank == bad else f"tp_rank {bad}: "
        assert failures == [f"{prefix}KeyError: 'a key'"]


def test_a_rank_that_leaves_the_host_early_meets_the_others_at_its_barrier(ranks):
    def act(rank):
        group = ranks.groups[rank]

        def original():
            if rank == 0:
                broken()
            torch.distributed.barrier(group)
            return "answered"

        boundary = Boundary(group)
        result = boundary.step(boundary.asked, original, around=ExitStack(), has_barrier=True)
        return result, len(boundary.failures())

    assert ranks.call(act) == [(None, 1), ("answered", 1), ("answered", 1)]


def test_scales_that_one_rank_can_not_read_are_chosen_on_none(ranks):
    table = torch.ones(2, 2, 6, dtype=torch.float64)

    def act(rank):
        read = broken if rank == 1 else lambda: table
        with pytest.raises(RefitError, match="KeyError: 'a key'"):
            choice.chosen(ranks.groups[rank], read, None)

    ranks.call(act)


def test_weights_whose_memory_is_released_are_not_touched():
    check_weights_are_there(SimpleNamespace(offload_tags={"kv_cache"}), "an update writes them")
    with pytest.raises(HostError, match="resume_memory_occupation"):
        check_weights_are_there(SimpleNamespace(offload_tags={"weights"}), "an update writes them")


@pytest.mark.parametrize("name", arguments.REFUSED)
def test_an_argument_under_which_an_update_would_not_be_what_it_says_is_refused(name):
    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    known = vars(parser.parse_args(["--model-path", "any"]))
    assert name in known or name == "enable_unified_cache_external_linker"  # since 0.5.20
    arguments.check_arguments(SimpleNamespace(**{name: known.get(name)}))
    with pytest.raises(ConfigError, match=f"^--{name.replace('_', '-')}"):
        arguments.check_arguments(SimpleNamespace(**{name: 2}))


def test_the_sender_s_memory_is_waited_for_on_its_own_device(monkeypatch):
    waited = []
    module = SimpleNamespace(synchronize=waited.append)
    monkeypatch.setattr(torch, "get_device_module", lambda _: module)
    wait_for(torch.device("cpu"))
    wait_for(torch.device("cuda", 1))
    assert waited == [torch.device("cuda", 1)]


@pytest.mark.parametrize("fails", [False, True])
def test_a_draft_model_s_copies_are_waited_for_too(monkeypatch, fails):
    """The client fills the buffer again when it is answered."""
    from sglang_fp8rl.engine.host import payload as of_request

    events = []
    monkeypatch.setattr(of_request, "wait_for", lambda device: events.append("waited"))

    def original(updater, payload):
        events.append("copied")
        if fails:
            broken()

    updater = SimpleNamespace(get_model=lambda: torch.nn.Linear(1, 1))
    payload = {"flattened_tensor": torch.zeros(4), "metadata": "[]", "nbytes": 4}
    monkeypatch.setattr(of_request, "from_text", lambda text: [])
    try:
        of_request.flattened_bucket(original, updater, payload)
    except KeyError:
        assert fails
    assert events == ["copied", "waited"]


def test_a_draft_model_reads_the_buffer_that_its_target_opened():
    """SGLang hands both one payload; a handle is opened once."""
    from sglang_fp8rl.engine.host import payload as of_request
    from sglang_fp8rl.wire.bucket import Bucket
    from sglang_fp8rl.wire.staging import OPEN_BUFFERS, StagingBuffers

    read = []
    updater = SimpleNamespace(get_model=lambda: torch.nn.Linear(1, 1))
    payload = Bucket.of([("w", torch.ones(4))], StagingBuffers()).payload(1, True).content
    for _ in ("target", "draft"):
        of_request.flattened_bucket(
            lambda _, payload: read.append(
                payload["flattened_tensor"].view(torch.float32).tolist()
            ),
            updater,
            payload,
        )
    assert read == [[1.0] * 4] * 2
    assert len(OPEN_BUFFERS) == 1
    OPEN_BUFFERS.close()
