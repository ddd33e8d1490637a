"""The law of a refit, without a model: where it begins and ends, and what is served after it."""

from __future__ import annotations

import pytest

from sglang_fp8rl.engine.arrival.update_scope import Origin, UpdateScope
from sglang_fp8rl.engine.report.refit_record import Outcome, Session, State, Verdict
from sglang_fp8rl.engine.report.refits import RefitLog
from sglang_fp8rl.wire.refit_note import RefitNote

NAMES = {"embed", "layer 0", "layer 1", "norm"}
HALVES = ({"embed", "layer 0"}, {"layer 1", "norm"})


class Server:
    """What `RefitReport` does with the log, for a model of four parameters."""

    def __init__(self):
        self.log, self.came = RefitLog(), {}
        self.call(*NAMES, scope=UpdateScope(Origin.STARTUP), flush=None)

    def call(self, *names, flush=False, failed=False, scope=None, **more):
        scope = scope or UpdateScope(Origin.TENSOR, is_last_call=flush, **more)
        log = self.log
        resumable = log.resumable(scope)
        if resumable and not any(self.came.get(name) == resumable.id for name in names):
            log.current = resumable
        current = log.current
        repeated = current and next((n for n in names if self.came.get(n) == current.id), None)
        ousted = set()
        if current and log.why_another(scope, repeated):
            ousted = current.senders | current.ousted
            log.conclude(self.verdict())
        refit = log.current or log.begin(scope, ousted)
        refit.outcome = Outcome.OPEN
        refit.has_waited |= not scope.is_last_call
        refit.senders |= {scope.sender} - {None}
        self.came.update(dict.fromkeys(names, refit.id))
        if failed:
            log.conclude(self.verdict("a NaN"))
        elif scope.origin is Origin.STARTUP or log.may_end(scope):
            verdict = self.verdict()
            if scope.origin is Origin.STARTUP or log.is_over(scope, verdict):
                log.conclude(verdict)
            elif scope.is_last_call:
                refit.outcome = Outcome.MIXED
        return log.state

    def verdict(self, *failures):
        refit = self.log.current
        taken = {name for name in NAMES if self.came.get(name) == refit.id}
        if refit.note and refit.note.wants_all and taken != NAMES:
            failures = (*failures, "left out")
        return Verdict(taken == NAMES, 4 - len(taken), (), failures, bool(taken))

    def full(self):
        self.call(*HALVES[0])
        return self.call(*HALVES[1], flush=True)


@pytest.fixture
def server():
    return Server()


def test_half_of_the_modules_in_good_order_are_mixed_until_all_came(server):
    assert server.call(*HALVES[0]) is State.OPEN
    assert server.call("layer 1", flush=True) is State.MIXED
    assert server.call("norm", flush=True) is State.MIXED  # of another refit
    assert server.full() is State.WHOLE


def test_a_client_that_flushes_with_every_call_is_whole_when_all_came(server):
    for _ in range(2):
        for name in sorted(NAMES)[:-1]:
            assert server.call(name, flush=True) is State.MIXED
        assert server.call(sorted(NAMES)[-1], flush=True) is State.WHOLE


def test_what_comes_behind_the_last_parameter_belongs_to_the_same_refit(server):
    server.call(*NAMES, flush=True)
    last = server.log.last
    assert server.call("a part of the norm that can't be counted", flush=True) is State.WHOLE
    assert server.log.last is server.log.complete is last
    assert server.call("norm", flush=True) is State.MIXED


def test_a_client_that_never_flushes_is_whole_when_all_came(server):
    for _ in range(2):
        assert server.call(*HALVES[0]) is State.OPEN
        assert server.call(*HALVES[1]) is State.WHOLE


@pytest.mark.parametrize("given_up", [["embed"], ["embed", "layer 0", "layer 1"]])
def test_a_full_update_is_whole_whatever_was_sent_before_it(server, given_up):
    server.call(*given_up)
    assert server.full() is State.WHOLE
    server.call(*given_up, failed=True)
    assert server.log.state is State.FAILED
    assert server.full() is State.WHOLE
    assert not server.log.failures


def test_a_failure_lasts_until_a_complete_refit(server):
    server.call("norm", failed=True)
    assert server.call("norm", flush=True) is State.FAILED
    assert server.call(*HALVES[0], flush=True) is State.FAILED
    assert server.full() is State.WHOLE


def test_what_comes_behind_a_failure_belongs_to_the_next_refit(server):
    server.call(*HALVES[0])
    server.call("layer 1", failed=True)
    server.call("layer 1")
    assert server.call("norm", flush=True) is State.FAILED
    assert server.log.last.outcome is Outcome.MIXED


def test_two_clients_that_take_turns_are_mixed(server):
    """By their processes; without those, by what the second one left out."""
    for first, second in (("process 1", "process 2"), (None, None)):
        server.call(*HALVES[0], sender=first)
        server.call(*HALVES[0], sender=second)
        if first:
            assert server.call(*HALVES[1], flush=True, sender=first) is State.MIXED
        else:
            server.call(*HALVES[1], flush=True)
        assert server.call(*HALVES[1], flush=True, sender=second) is State.MIXED
        assert server.full() is State.WHOLE


def test_two_named_refits_do_not_add_up_to_one(server):
    one, other = RefitNote("one", wants_all=True), RefitNote("other", wants_all=True)
    server.call("embed", note=one)
    assert server.call(*NAMES - {"embed"}, note=other, flush=True) is State.FAILED
    assert server.full() is State.WHOLE


def test_a_partial_refit_leaves_the_state_as_it_was(server):
    partial = RefitNote("adapter", is_partial=True)
    assert server.call("norm", note=partial, flush=True) is State.WHOLE
    assert server.log.last.outcome is Outcome.OK
    assert server.log.complete.id < server.log.last.id
    server.call("embed", failed=True)
    assert server.call("norm", note=partial, flush=True) is State.FAILED


def test_a_session_is_a_refit_and_its_flushes_end_nothing(server):
    server.log.session = Session()
    assert server.call(*HALVES[0], flush=True, in_session=True) is State.OPEN
    server.call("layer 1", flush=True, in_session=True)
    server.log.conclude(server.verdict())
    server.log.session = None
    assert server.log.state is State.MIXED


def test_a_refit_that_wrote_nothing_is_none(server):
    last = server.log.last
    assert server.call("rotary table", flush=True) is State.WHOLE
    assert server.log.last is last


def test_released_memory_is_unloaded_until_a_complete_refit(server):
    server.log.unload()
    assert server.call(*HALVES[0], flush=True) is State.UNLOADED
    assert server.full() is State.WHOLE
