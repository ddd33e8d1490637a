"""An exception in any call of ours between a request and its answer is a failed answer on every rank; no
rank waits for another, and the next full update mends what it left."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from support.engine.commands import (
    begin,
    digests,
    end,
    forget_buckets,
    model_of,
    status,
    update,
    update_from_disk,
)
from support.engine.engine_host import EngineError
from support.engine.injection import INJECTED, injected_in, traced_in
from support.engine.models import MODELS
from support.engine.pool import on

from sglang_fp8rl.versions import HAS_SESSIONS

pytestmark = pytest.mark.engine

MODEL = MODELS["qwen3"]
FIRST, SECOND = list(MODEL.first.items()), list(MODEL.second.items())
SAMPLE, WHOLE_SAMPLE = 4, 24  # of the functions that are called; the latter in `test-all`


def forget_what_was_made(scheduler: Any) -> None:
    """It is made once; what makes it is to run again."""
    for extension in model_of(scheduler).fp8rl_refit.extensions:
        vars(extension).pop("made", None)


def check_weights(scheduler: Any) -> tuple[bool, str]:
    from sglang.srt.managers.io_struct import CheckWeightsReqInput

    result = scheduler.weight_updater.check_weights(CheckWeightsReqInput(action="checksum"))
    return result.success, result.message


@dataclass(frozen=True)
class Asked:
    """Asks for an internal state by `rid`."""

    mark: str

    def __call__(self, scheduler: Any) -> tuple[bool, str]:
        from sglang.srt.managers.io_struct import GetInternalStateReq

        state = scheduler.get_internal_state(GetInternalStateReq(rid=self.mark)).internal_state
        error = next((state[key] for key in state if key.endswith("_error")), "")
        return not error, error


@dataclass(frozen=True)
class Request:
    """One that is answered while something raises, and those that come before it."""

    name: str
    act: Callable[..., Any]
    args: tuple[Any, ...] = ()
    before: Sequence[tuple[Callable[..., Any], tuple[Any, ...]]] = field(default=())
    needs_sessions: bool = False

    def prepared(self, host: Any) -> None:
        for act, args in self.before:
            assert host.call(act, *args)[0]


HALF = FIRST[: len(FIRST) // 2]
REQUESTS = [
    Request("update", update, (SECOND,)),
    Request("bucket", update, (FIRST[5:9], "flattened_bucket", False)),
    Request("begin", begin, needs_sessions=True),
    Request("in-session", update, (HALF,), [(begin, ())], needs_sessions=True),
    Request("end", end, (), [(begin, ()), (update, (FIRST,))], needs_sessions=True),
    Request("empty-end", end, (), [(begin, ())], needs_sessions=True),
    Request("disk", update_from_disk, ("a checkpoint that is not there",)),
    Request("fingerprint", Asked("fp8rl-fingerprint")),
    Request("plan", Asked("fp8rl-plan:")),
    Request("check-weights", check_weights),
]


def mended(host: Any, *, with_bytes: bool) -> str:
    """Bring the engine back by a full update; what is wrong then."""
    if any("session is open" in text for text in host.call(status)["problems"]):
        host.call(end)
    answers = host.call_all(update, FIRST)
    if not all(success for success, _ in answers):
        return f"a full update is refused: {answers}"
    states = [rank["state"] for rank in host.call_all(status)]
    if states != ["whole"] * host.tp_size:
        return f"states {states}"
    if with_bytes and host.call_all(digests) != host.as_loaded.digests:
        return "other bytes"
    return ""


def wrong_with(host: Any, one: Request, name: str, rank: int) -> str:
    """What is wrong with the answers, or behind them."""
    host.call_all(forget_buckets)
    host.call_all(forget_what_was_made)
    one.prepared(host)
    try:
        answers = host.call_all(injected_in, name, rank, one.act, *one.args)
    except EngineError as error:
        host.in_doubt = True
        return f"no answer: {str(error).strip().splitlines()[-1]}"
    if not answers[rank][0] and INJECTED not in answers[rank][1]:
        return f"another failure: {answers[rank][1]}"
    is_update = one.act in (update, update_from_disk, begin, end)
    told = answers if is_update else [answers[rank]]
    # Without a checkpoint the other ranks fail by themselves.
    is_told = [one.act is update_from_disk or INJECTED in text for _, text in told]
    if any(success for success, _ in told) or not all(is_told):
        return f"answers {[(success, text[:100]) for success, text in answers]}"
    refused = {"whole"} if one.act is end else {"whole", "open", "mixed"}
    if one.act in (update, update_from_disk, end) and any(
        found["state"] in refused for found in host.call_all(status)
    ):
        return "the status says nothing"
    return mended(host, with_bytes=True)


@pytest.mark.parametrize("rank", [1, pytest.param(0, marks=pytest.mark.slow)])
@pytest.mark.parametrize("one", REQUESTS, ids=lambda one: one.name)
@on("qwen3-tp2")
def test_every_call_may_raise(host, one, rank, request):
    if one.needs_sessions and not HAS_SESSIONS:
        pytest.skip("this SGLang has no sessions")
    mended(host, with_bytes=False)  # what is done once, at the first update, is done
    host.call_all(forget_buckets)  # as where a call raises: what is replayed is called in neither
    one.prepared(host)
    names = host.call_all(traced_in, one.act, *one.args)[rank][1]
    mended(host, with_bytes=False)
    count = WHOLE_SAMPLE if request.config.getoption("--all") else SAMPLE
    names = names[:: -(-len(names) // count)]
    assert names
    broken = {}
    for name in names:
        wrong = wrong_with(host, one, name, rank)
        if wrong:
            broken[name] = wrong
        if host.in_doubt:
            break
    assert not broken
