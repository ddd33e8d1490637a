"""The law of a refit, without a model: where it begins and ends, and what is served after it."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import pytest
import torch

from sglang_fp8rl.engine.arrival.update import Origin, Update
from sglang_fp8rl.engine.interception import Region
from sglang_fp8rl.engine.law import law, log
from sglang_fp8rl.engine.law.law import Law
from sglang_fp8rl.engine.law.record import Outcome, State
from sglang_fp8rl.engine.law.status import problems, served
from sglang_fp8rl.engine.law.unseen_writes import memory_number
from sglang_fp8rl.engine.ledger.ledger import Arrived, Ledger
from sglang_fp8rl.engine.model.landings import Known, Landing, NameTable
from sglang_fp8rl.engine.model.parameters import Target
from sglang_fp8rl.engine.native.pairs import PairTable
from sglang_fp8rl.errors import RefitError
from sglang_fp8rl.wire.refit_note import RefitNote

NAMES = ("embed", "layer 0", "layer 1", "norm")
HALVES = (NAMES[:2], NAMES[2:])
ALL = Region((0,), (1,))


class Server:
    """The law of four parameters of one element each, and calls as `Calls` and the hooks make them."""

    def __init__(self):
        names = NameTable()
        self.targets = {}
        for index, name in enumerate(NAMES):
            parameter = torch.nn.Parameter(torch.zeros(1), requires_grad=False)
            target = Target(name, parameter, None, index=index)
            names.known[name] = Known((1,), [Landing(target, (), (ALL,), (ALL,))])
            self.targets[name] = target
        ledger = Ledger(self.targets.values(), names)
        model = SimpleNamespace(ledger=ledger, pairs=PairTable(), written_targets=list)
        self.law = Law(model)
        self.log = self.law.log
        self.call(*NAMES, scope=Update(Origin.STARTUP))

    def call(self, *names, flush=False, failed=False, halves=(), scope=None, **more):
        """Of `halves` nothing is stored yet. Returns the state behind it."""
        scope = scope or Update(Origin.TENSOR, is_last_call=flush, **more)
        law, log = self.law, self.log
        numbers = self.start_call(scope, *names)
        stored = [name for name in names if name in self.targets and name not in halves]
        for name in stored:
            law.ledger.write(self.targets[name], ALL)
        errors = {names[0]: "a NaN"} if failed else {}
        law.end_call(Arrived(len(names), 1, bool(stored), numbers=numbers), errors, scope)
        if scope.origin is not Origin.STARTUP and log.current is not None:
            log.end_request(law.verdict(scope), scope)
        return log.state

    def start_call(self, scope, *names):
        """Returns the numbers of the names."""
        numbers = self.law.brought.numbers_of(names)
        self.law.ledger.stamp += 1
        self.law.start_call(scope, numbers)
        return numbers

    def flushing(self, *calls):
        """A whole refit that asks for the flush with every call; the states behind them."""
        return [self.call(*names, flush=True) for names in calls]

    @property
    def served(self):
        """Refits that the parameters come from."""
        return [row["refit"] for row in served(self.law)]

    def end_session(self):
        """As `refit_end.end_request`; returns whether the client is told that it succeeded."""
        law, log = self.law, self.log
        update = Update(Origin.TENSOR, in_session=True, ends_session=True)
        is_running = log.current is not None
        ended = log.end_request(law.verdict(update), update) if is_running else None
        failed = law.close_session()
        return (ended or failed) is None or (ended or failed).outcome is not Outcome.FAILED

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


# -- calls that are of no full refit, and full refits behind them ----------------------------------

STRAYS = [*((name,) for name in NAMES), ("layer 0", "norm"), NAMES[:3], NAMES[1:]]


@pytest.mark.parametrize("failed", [False, True])
@pytest.mark.parametrize("flush", [False, True])
@pytest.mark.parametrize("stray", STRAYS, ids="-".join)
def test_behind_a_stray_call_a_full_update_is_whole_at_its_end(server, stray, flush, failed):
    server.call(*stray, flush=flush, failed=failed)
    assert server.call(*HALVES[0]) is not State.WHOLE
    assert server.call(*HALVES[1], flush=True) is State.WHOLE
    assert server.served == [server.log.complete.id]
    assert problems(server.law) == []


@pytest.mark.parametrize("stray", [*STRAYS, HALVES[1]], ids="-".join)
@pytest.mark.parametrize("ended", [False, True])
def test_a_stray_call_between_two_of_a_refit_costs_one_refit(server, stray, ended):
    server.call(*HALVES[0])
    server.call(*stray, flush=ended)
    server.call(*HALVES[1], flush=True)
    assert server.call(*HALVES[0]) is not State.WHOLE
    assert server.call(*HALVES[1], flush=True) is State.WHOLE
    assert server.served == [server.log.complete.id]


OTHERWISE = [order for order in itertools.permutations(NAMES) if order[0] != NAMES[0]]


@pytest.mark.parametrize("order", OTHERWISE, ids="-".join)
def test_buckets_may_come_in_another_order_at_each_refit(server, order):
    for names in (NAMES, order, NAMES[::-1]):
        *before, last = server.flushing(*((name,) for name in names))
        assert State.WHOLE not in before
        assert last is State.WHOLE


def flush_the_cache(server):
    server.law.flushed(server.law.verdict_at_flush())


def open_a_session(server):
    server.law.begin_session(None)
    for names in HALVES:
        server.call(*names, in_session=True)
    server.log.conclude(server.law.verdict())
    server.law.close_session()


def send_all_in_one_call(server):
    server.call(*NAMES, flush=True)


def end_with_a_flush_of_its_own(server):
    server.call(*HALVES[0])
    server.call(*HALVES[1], flush=True)


SAYS_WHERE_IT_BEGINS = [
    flush_the_cache,
    open_a_session,
    send_all_in_one_call,
    end_with_a_flush_of_its_own,
]


@pytest.mark.parametrize("failed", [False, True])
@pytest.mark.parametrize("at", [0, 1], ids=["before", "between"])
@pytest.mark.parametrize("say", SAYS_WHERE_IT_BEGINS)
@pytest.mark.parametrize("stray", [*STRAYS, HALVES[0]], ids="-".join)
def test_a_client_that_flushes_always_is_never_called_whole_out_of_step(
    server, stray, say, at, failed
):
    """Until something says where its next refit begins: any four calls of four names look like a refit."""
    calls = [*HALVES[:at], stray, *HALVES[at:]]
    for names in calls:
        server.call(*names, flush=True, failed=failed and names is stray)
    for _ in range(3):
        assert server.flushing(*HALVES)[0] is not State.WHOLE
    say(server)
    for _ in range(2):
        assert server.flushing(*HALVES) == [State.MIXED, State.WHOLE]
        assert server.served == [server.log.complete.id]
    assert problems(server.law) == []


def test_a_flush_of_the_cache_ends_a_refit_that_nobody_named(server):
    server.call(*HALVES[0])
    server.law.flushed(server.law.verdict_at_flush())
    assert server.log.state is State.MIXED
    assert server.log.last.outcome is Outcome.MIXED
    assert set(server.log.last.found.names) == set(HALVES[1])
    assert server.full() is State.WHOLE
    server.law.begin_session(None)
    server.call(*HALVES[0], in_session=True)
    server.law.flushed(server.law.verdict_at_flush())
    assert server.log.state is State.OPEN


def test_a_tensor_that_comes_again_leaves_what_came_behind_it(server):
    """In a session too: a client that begins anew in it is answered as if it had begun there."""
    server.law.begin_session(None)
    for name in ("embed", "layer 0", "embed", "layer 0", "layer 1", "norm"):
        server.call(name, in_session=True)
    server.log.conclude(server.law.verdict())
    assert server.law.close_session() is None
    assert server.log.state is State.WHOLE
    assert server.log.last.tensors == len(NAMES)


BEHIND_A_FAILURE = {
    "nothing": ([], False),
    "the rest": ([HALVES[1]], False),
    "what failed": ([HALVES[0]], False),
    "the rest, and then all": ([HALVES[1], *HALVES], True),
    "all": ([*HALVES], True),
}


@pytest.mark.parametrize(("calls", "succeeds"), BEHIND_A_FAILURE.values(), ids=BEHIND_A_FAILURE)
def test_a_session_with_a_refused_bucket_ends_well_only_behind_all_tensors(server, calls, succeeds):
    server.law.begin_session(None)
    server.call(*HALVES[0], in_session=True, failed=True)
    for names in calls:
        server.call(*names, in_session=True)
    assert server.end_session() == succeeds
    assert server.log.state is (State.WHOLE if succeeds else State.FAILED)
    assert server.log.last.outcome is (Outcome.OK if succeeds else Outcome.FAILED)
    server.law.begin_session(None)
    assert server.end_session()  # the next one is not blamed


def test_a_name_given_up_with_its_half_is_no_part_of_the_refit_before_it(server):
    """Its half was dropped with the session that came between; it is not of the last complete refit."""
    server.call(*NAMES, flush=True)
    server.call("norm", halves=["norm"])
    server.law.begin_session(None)
    server.law.close_session()
    assert server.call("norm", flush=True) is State.MIXED


def test_halves_behind_a_tensor_that_comes_again_go_on_waiting(server):
    server.call("norm")
    stamp = server.law.ledger.stamp
    server.call("embed", "layer 0", halves=["embed"])
    server.start_call(Update(Origin.TENSOR), "norm")
    assert server.log.current.since == stamp + 1


def test_two_clients_that_take_turns_are_mixed(server):
    server.call(*HALVES[0])
    server.call(*HALVES[0])
    server.call(*HALVES[1], flush=True)
    assert server.call(*HALVES[1], flush=True) is State.MIXED
    assert server.full() is State.WHOLE


def test_what_is_remembered_of_refits_is_bounded(server, monkeypatch):
    partial = RefitNote("adapter", extent="partial")
    for number in range(400):
        note = RefitNote(str(number), extent="partial") if number % 2 else partial
        server.call("norm", note=note, flush=True)
        server.call("embed", flush=True)
    assert len(server.log.begun) < 300
    assert len(server.log.left_out) <= 16
    assert [row["parameters"] for row in served(server.law)] == [
        1,
        1,
        2,
    ]


def test_nothing_is_remembered_of_requests_that_could_not_be_read(server):
    server.call(*NAMES, flush=True)
    begun = list(server.log.begun)
    for _ in range(100):
        server.law.fail(["it can't be read"], Update(Origin.TENSOR))
    assert server.log.begun == begun
    assert server.log.current is None
    assert server.log.state is State.FAILED
    assert server.log.last.id == server.log.count == begun[-1].id + 100
    assert (
        server.flushing(*HALVES)[-1] is not State.WHOLE
    )  # it is not known where its client's next update begins
    assert server.full() is State.WHOLE


def test_two_named_refits_do_not_add_up_to_one(server):
    one, other = RefitNote("one", extent="all"), RefitNote("other", extent="all")
    server.call("embed", note=one)
    assert server.call(*NAMES[1:], note=other, flush=True) is State.FAILED
    assert server.full() is State.WHOLE


@pytest.mark.parametrize("others", [0, log.MAX_LISTED])
def test_the_rest_of_a_broken_partial_refit_is_mixed_however_many_broke_since(server, others):
    first, *notes = [RefitNote(str(at), extent="partial") for at in range(1 + others)]
    for note in (first, *notes):
        server.call("norm", note=note, failed=True)
    assert server.full() is State.WHOLE
    assert server.call("layer 0", note=first, flush=True) is State.MIXED


@pytest.mark.parametrize("moved", ["a vector", "a matrix", "experts"])
def test_words_that_change_places_within_a_parameter_change_the_number_of_the_memory(moved):
    generator = torch.Generator().manual_seed(0)
    shapes = {"a vector": (16, 4), "a matrix": (64, 64), "experts": (4, 8, 16)}
    held = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    targets = [SimpleNamespace(parameter=one) for one in held.values()]
    model = SimpleNamespace(written_targets=lambda: targets)
    before = memory_number(model)
    held[moved].copy_(held[moved].flip(0))
    assert memory_number(model) != before


def test_the_memory_has_a_number_where_a_parameter_is_empty():
    some = torch.ones(3)
    targets = [SimpleNamespace(parameter=one) for one in (torch.empty(0, 4), some)]
    model = SimpleNamespace(written_targets=lambda: targets)
    before = memory_number(model)
    some[1] = 2
    assert memory_number(model) != before


def test_a_partial_refit_leaves_the_state_as_it_was(server):
    partial = RefitNote("adapter", extent="partial")
    assert server.call("norm", note=partial, flush=True) is State.WHOLE
    assert server.log.last.outcome is Outcome.OK
    assert server.log.complete.id < server.log.last.id
    server.call("embed", failed=True)
    assert server.call("norm", note=partial, flush=True) is State.FAILED


def test_a_session_is_a_refit_and_its_flushes_end_nothing(server):
    server.law.begin_session(None)
    assert server.call(*HALVES[0], flush=True, in_session=True) is State.OPEN
    server.call("layer 1", flush=True, in_session=True)
    server.log.conclude(server.law.verdict())
    server.law.close_session()
    assert server.log.state is State.MIXED


def test_a_refit_that_wrote_nothing_is_none(server):
    last = server.log.last
    assert server.call("rotary table", flush=True) is State.WHOLE
    assert server.log.last is last


def test_released_memory_is_unloaded_until_a_complete_refit(server):
    server.law.weights_lost()
    assert server.call(*HALVES[0], flush=True) is State.UNLOADED
    assert server.full() is State.WHOLE


def test_names_that_never_came_are_among_those_that_did_not():
    """Of a server on dummy weights the first bucket is the first that names anything."""
    brought = law.NamesBrought()
    brought.bring(brought.numbers_of(["norm"]), 3)
    assert brought.not_brought([*NAMES, *"abc"], 3) == [*NAMES[:-1], *"abc"]


def test_what_is_kept_of_undeclared_partial_refits_is_bounded(server, monkeypatch):
    for _ in range(100):
        server.call("norm", flush=True)
    assert len(server.log.left_out) <= 16
    assert server.log.state is State.MIXED
    known = len(NAMES)
    monkeypatch.setattr(law, "MAX_NAMES", known + 3)
    for at in range(3):
        server.law.brought.numbers_of([f"stray {at}"])
    with pytest.raises(RefitError, match="a new name"):
        server.law.brought.numbers_of(["stray 3"])
    assert server.full() is State.WHOLE


# -- the same parameters by other names, sessions and names of refits together ---------------------


@pytest.mark.parametrize("flush", [False, True])
def test_other_names_behind_a_complete_refit_are_of_another_one(server, flush):
    """A trainer that sends experts one by one, and one that sends them fused."""
    others = {f"model.{name}": target for name, target in server.targets.items()}
    server.targets |= others
    assert server.call(*NAMES, flush=True) is State.WHOLE
    complete = server.log.complete
    first, *rest = others
    assert server.call(first, flush=flush) is (State.MIXED if flush else State.OPEN)
    assert server.log.complete is complete
    assert server.call(*rest, flush=True) is State.WHOLE
    assert server.served == [server.log.complete.id] != [complete.id]


def test_a_failure_by_a_new_name_does_not_undo_a_complete_refit(server):
    assert server.call(*NAMES, flush=True) is State.WHOLE
    complete = server.log.complete
    assert server.call("unheard of", flush=True, failed=True) is State.FAILED
    assert server.log.complete is complete
    assert server.log.complete.outcome is Outcome.OK
    assert server.log.last is not complete


@pytest.mark.parametrize("of_session", [RefitNote("step"), RefitNote("step", extent="all")])
def test_a_session_takes_the_calls_that_name_its_refit(server, of_session):
    note = RefitNote("step", "v2", extent="all")
    server.law.begin_session(of_session)
    for names, flush in zip(HALVES, (False, True), strict=True):
        assert server.call(*names, in_session=True, note=note, flush=flush) is State.OPEN
    assert server.log.moved_to is None
    assert server.end_session()
    assert server.log.state is State.WHOLE
    assert server.log.last.note.extent == "all"
    assert server.log.moved_to == "v2"


def test_a_session_that_is_named_by_its_calls_has_to_bring_what_they_announce(server):
    server.law.begin_session(RefitNote("step"))
    server.call(*HALVES[0], in_session=True, note=RefitNote("step", extent="all"))
    assert not server.end_session()
    assert server.log.state is State.FAILED


def test_a_call_of_another_refit_is_not_of_the_session(server):
    server.law.begin_session(RefitNote("a"))
    server.call(*HALVES[0], in_session=True)
    server.call(*NAMES, in_session=True, note=RefitNote("b"), flush=True)
    assert server.log.last.note.id == "b"
    assert server.log.last.session is None


def test_what_reaches_nothing_behind_a_complete_refit_does_not_rename_it(server):
    server.call(*NAMES, flush=True, version="v1")
    assert server.call("a rotary table", version="v2") is State.WHOLE
    assert server.log.complete.version == "v1"


def test_the_version_may_come_with_a_last_call_that_brings_nothing(server):
    """A tied head, for one: everything has come before it."""
    assert server.call(*NAMES) is State.WHOLE
    assert server.call("a tied head", flush=True, version="v2") is State.WHOLE
    assert (server.log.complete.version, server.log.moved_to) == ("v2", "v2")


def test_a_call_that_joined_on_this_rank_is_of_the_refit_that_another_rank_began(server):
    server.call(*NAMES, flush=True)
    whole = server.log.complete
    update = Update(Origin.TENSOR, is_last_call=False)
    numbers = server.start_call(update, "none of this rank's")
    update.refit = server.law.end_call(Arrived(1, 1, False, numbers=numbers), {}, update)
    assert update.refit is whole
    update.refit_number, update.calls = whole.id + 1, 1
    server.law.part(update)
    assert (update.refit.id, whole.outcome) == (whole.id + 1, Outcome.OK)
    assert server.log.current is update.refit
    assert len(update.refit.calls) == 1
    assert server.law.verdict().lacking == len(NAMES)


def test_a_flush_that_ends_nothing_takes_no_version_away(server):
    server.call(*NAMES, flush=True, version="v1")
    flush_the_cache(server)
    assert server.log.moved_to == "v1"


def test_no_version_moves_while_a_draft_lacks_what_it_lost(server, monkeypatch):
    monkeypatch.setattr(log, "lost_of_drafts", lambda: ["fc.weight"])
    server.call(*NAMES, flush=True, version="v7")
    assert server.log.complete.version == "v7"
    assert server.log.state is State.UNLOADED  # and of what is not whole no version is told


def computes_with(server, *names):
    """As learnt at the start: SGLang does more with these than copy them."""
    for name in names:
        server.law.ledger.names.known[name].reason = "SGLang computes with it while loading"
    server.law._extent._known = -1  # count anew


def test_what_sglang_computes_from_may_come_by_another_name(server):
    """Nemotron-H takes its layers below `backbone.` and below `model.`, and computes with each `A_log`."""
    computes_with(server, "norm")
    server.targets["model.norm"] = server.targets["norm"]
    update = {"note": RefitNote("step", extent="all"), "flush": True}
    assert server.call(*NAMES[:3], **update) is State.FAILED
    assert server.call(*NAMES[:3], "model.norm", **update) is State.WHOLE


def test_a_part_of_what_is_computed_with_is_not_all_of_it(server):
    computes_with(server, "norm")
    server.law.ledger.coverage.sizes[3] = 2  # of which one element has a box
    server.targets["model.norm"] = server.targets["norm"]
    assert server.call(*NAMES[:3], "model.norm", flush=True) is State.MIXED


def test_of_two_names_that_are_computed_into_one_parameter_both_have_to_come(server):
    known = server.law.ledger.names.known
    known["half"] = Known((1,), known["norm"].landings)
    computes_with(server, "norm", "half")
    server.targets["half"] = server.targets["norm"]
    assert server.call(*NAMES, flush=True) is State.MIXED
    assert server.call("half", flush=True) is State.WHOLE
