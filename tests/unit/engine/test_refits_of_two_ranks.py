"""One refit on two ranks, through the real updater: whatever each of them is sent, both say the same, and what is called
whole is what was sent. The model is a toy, its ranks are threads."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("sglang")

from test_any_call_raises import SIZE, Folding, Server, check, end, io_struct
from test_any_call_raises import pytestmark as pytestmark

from sglang_fp8rl.engine.law import log, refit_end, status
from sglang_fp8rl.engine.law.law import law_of
from sglang_fp8rl.engine.native.pairs import Half
from sglang_fp8rl.wire.refit_note import ALL, PARTIAL, RefitNote, apart_from_versions
from tools.census.toys.toy import Toy, weights

ROTARY = "r"
HERE = threading.local()  # whose thread this is


class Four(Toy):
    names = ("a.weight", "b.weight", "c.weight", "d.weight")

    def __init__(self) -> None:
        super().__init__()
        self.c, self.d = (torch.nn.Linear(4, 6, bias=False) for _ in range(2))
        for parameter in self.parameters():
            parameter.requires_grad = False

    def load(self, name, tensor):
        if "rotary" not in name:
            super().load(name, tensor)


def tensors(letters, seed):
    found = weights(Four(), seed) | {"rotary_emb.inv_freq": torch.ones(2)}
    names = ("rotary_emb.inv_freq" if one == ROTARY else f"{one}.weight" for one in letters)
    return [(name, found[name]) for name in names]


class Ranks(Server):
    def __init__(self, monkeypatch):
        super().__init__(monkeypatch, Four)
        for rank, manager in enumerate(self.managers):
            manager.rank, manager.draft_worker = rank, object()

    def send(
        self, *letters, seed=1, flush=True, note=None, version=None, selector="all", lost=None
    ):
        """One request; letters for both ranks, or for each. The handles of rank `lost` can't be opened."""

        def act(manager):
            fields = {"tensors": tensors(letters[manager.rank % len(letters)], seed)}
            if manager.rank == lost:
                fields = {}
            request = SimpleNamespace(
                serialized_named_tensors=[b""] * SIZE,
                load_format=None,
                flush_cache=flush,
                rid=note and note.to_text(),
                weight_version=version,
                selector=selector,
                **fields,
            )
            return manager.update_weights_from_tensor(request)

        return self.told(act)

    def disk(self, letters, seed, version=None):
        request = SimpleNamespace(tensors=tensors(letters, seed), rid=None, weight_version=version)
        return self.told(lambda manager: manager.update_weights_from_disk(request))

    def ipc(self, *buckets, seed, version=None, note=None, flush=True):
        """One request; letters of each bucket for both ranks, or for each."""

        def act(manager):
            mine = [one if isinstance(one, str) else one[manager.rank] for one in buckets]
            request = SimpleNamespace(
                buckets=[tensors(letters, seed) for letters in mine],
                rid=note and note.to_text(),
                weight_version=version,
                flush_cache=flush,
            )
            return manager.update_weights_from_ipc(request)

        return self.told(act)

    def begin(self, note=None):
        rid = note and note.to_text()
        return self.call(
            lambda one: one.begin_weight_update(io_struct.BeginWeightUpdateReqInput(rid=rid))
        )

    def end(self):
        return self.told(end)

    def told(self, act):
        """Whether it succeeded, and the version that it moved to: both ranks say the same."""

        def on_its_rank(manager):
            HERE.rank = manager.rank
            return act(manager)

        found = {
            (one.success, apart_from_versions(one.message)[1][0]) for one in self.call(on_its_rank)
        }
        assert len(found) == 1, found
        assert len({law_of(one.refit).log.count for one in self.managers}) == 1
        return found.pop()

    @property
    def state(self):
        found = {manager.state()["state"] for manager in self.managers}
        assert len(found) == 1, found
        return found.pop()

    def holds(self, seed):
        expected = weights(Four(), seed)
        return all(
            torch.equal(one.data, expected[name])
            for manager in self.managers
            for name, one in manager.refit.model.named_parameters()
        )


@pytest.fixture
def ranks(monkeypatch):
    return Ranks(monkeypatch)


STEP = RefitNote("step", "v2", ALL)


# -- where it begins on other ranks only -----------------------------------------------------------


@pytest.mark.parametrize("nothing", [ROTARY, ""])
@pytest.mark.parametrize("flush", [True, False])
def test_a_rank_that_is_sent_nothing_of_an_update_is_not_whole(ranks, nothing, flush):
    assert ranks.send("abcd", version="v1") == (True, "v1")
    assert ranks.send("abcd", nothing, seed=2, version="v2", flush=flush) == (True, None)
    assert ranks.state == ("mixed" if flush else "open")


@pytest.mark.parametrize("note", [None, STEP])
def test_what_a_rank_has_of_a_broken_off_update_is_of_no_other(ranks, note):
    ranks.send("abc", flush=False, note=note)
    assert ranks.send("abcd", "d", seed=2, note=note, version="v2")[1] is None
    assert ranks.state != "whole"
    assert ranks.send("abcd", seed=3, note=RefitNote("next", "v3", ALL)) == (True, "v3")
    assert ranks.state == "whole"


def test_nor_in_a_session(ranks):
    ranks.begin(STEP)
    ranks.send("abc", flush=False)
    ranks.send("abcd", "d", seed=2, flush=False)
    assert ranks.end() == (False, None)
    assert ranks.state == "failed"


def test_an_update_that_begins_anew_may_bring_ranks_other_lists(ranks):
    ranks.send("a", "c", flush=False, note=STEP)
    for lists in (("a", "d"), ("bc", "")):
        assert ranks.send(*lists, seed=2, flush=False, note=STEP)[0]
    assert ranks.send("d", "abc", seed=2, note=STEP) == (True, "v2")
    assert ranks.state == "whole"
    assert ranks.holds(2)


@pytest.mark.parametrize("lost", [0, 1])
def test_after_a_request_that_one_rank_can_t_read_all_refits_have_one_number(ranks, lost):
    assert ranks.send("abcd", lost=lost) == (False, None)
    assert ranks.ipc("ab", "cd", seed=2, version="v2") == (True, "v2")
    assert ranks.send("ab", seed=3, flush=False) == (True, None)
    assert ranks.send("cd", seed=3, version="v3") == (True, "v3")
    assert ranks.state == "whole"


def test_a_partial_update_that_begins_anew_is_the_same_on_both_ranks(ranks):
    partial = RefitNote("a part", "v3", PARTIAL)
    ranks.send("ac", flush=False, note=partial)
    ranks.send("bcd", "bd", seed=2, note=partial)
    assert ranks.send("abcd", seed=3, note=partial) == (True, "v3")


def test_all_calls_of_a_request_are_of_the_refit_that_began_on_other_ranks(ranks):
    ranks.send("a", "c", flush=False, note=STEP)
    assert ranks.ipc(("a", "d"), ("b", "ab"), seed=2, note=STEP, flush=False)[0]
    assert ranks.ipc(("c", "c"), ("d", "r"), seed=2, note=STEP) == (True, "v2")
    assert ranks.state == "whole"
    assert ranks.holds(2)


def test_a_bucket_that_reaches_nothing_leaves_the_complete_refit_complete(ranks):
    ranks.ipc("abcd", seed=1, version="v1")
    ranks.ipc(ROTARY, "ab", seed=2)
    assert ranks.state == "mixed"
    assert {law_of(one.refit).log.complete.outcome.value for one in ranks.managers} == {"ok"}
    assert ranks.ipc("ab", "cd", seed=3, version="v3") == (True, "v3")


def test_a_bucket_that_reaches_nothing_mends_nothing(ranks):
    assert ranks.send("abcd", version="v1") == (True, "v1")
    broken = ranks.managers[1].refit
    broken.extensions.append(Folding(broken))
    ranks.call(check)
    broken.extensions.pop()
    assert ranks.send(ROTARY, version="v2") == (True, None)
    assert ranks.state == "failed"
    assert ranks.send("abcd", seed=2, version="v3") == (True, "v3")


def test_ranks_with_other_lists_say_alike_whether_they_are_in_step(ranks):
    ranks.send("abcd")
    ranks.send("a", "", flush=False)
    ranks.send("ab", "c", seed=2, flush=True)
    for seed in (3, 4):
        ranks.send("ab", seed=seed, flush=False)
        ranks.send("cd", seed=seed, flush=True, version=f"v{seed}")
        assert ranks.state in ("whole", "mixed", "open")
    assert ranks.state == "whole"


# -- several clients -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "come_between",
    [
        lambda ranks: ranks.send("abcd", seed=2, note=RefitNote("another", "vB", ALL)),
        lambda ranks: ranks.disk("abcd", 2, "vB"),
        lambda ranks: ranks.call(lambda one: law_of(one.refit).weights_lost()),
    ],
    ids=["named", "disk", "memory"],
)
@pytest.mark.parametrize("came", ["ab", "abcd"])
def test_the_end_of_a_session_says_that_its_refit_was_given_up(ranks, come_between, came):
    ranks.begin(STEP)
    ranks.send(came, flush=False)
    come_between(ranks)
    assert ranks.end() == (False, None)
    assert ranks.state == "failed"


def test_a_partial_refit_that_another_came_into_is_not_all_there(ranks):
    partial = RefitNote("a part", "v3", PARTIAL)
    ranks.send("a", seed=7, flush=False, note=partial)
    ranks.disk("abcd", 8)
    assert ranks.send("b", seed=7, note=partial) == (True, None)
    assert ranks.state == "mixed"


@pytest.mark.parametrize("rank", [0, 1])
def test_nor_one_of_which_something_failed(ranks, rank):
    partial = RefitNote("a part", "v3", PARTIAL)
    assert ranks.send("a", seed=7, flush=False, note=partial, lost=rank) == (False, None)
    assert ranks.send("abcd", seed=8, note=STEP) == (True, "v2")
    assert ranks.send("b", seed=7, note=partial) == (True, None)
    assert ranks.state == "mixed"


@pytest.mark.parametrize("between", ["unreadable", "memory"])
def test_nor_where_only_some_ranks_could_read_what_came_into_it(ranks, between):
    partial = RefitNote("a part", "v3", PARTIAL)
    ranks.send("a", seed=7, flush=False, note=partial)
    if between == "memory":
        ranks.call(lambda one: law_of(one.refit).weights_lost())
    else:
        ranks.send("b", seed=9, note=RefitNote("another"), lost=0)
    ranks.send("abcd", seed=8, note=STEP)
    assert ranks.send("b", seed=7, note=partial) == (True, None)
    assert ranks.state == "mixed"


def test_a_draft_of_another_client_ends_no_refit_and_names_none(ranks):
    ranks.send("ab", flush=False, version="v2")
    ranks.send("", version="vD", selector="draft")
    assert ranks.send("cd") == (True, "v2")
    assert ranks.state == "whole"


def test_a_client_that_one_rank_can_t_read_ends_the_session_s_refit_on_all(ranks):
    ranks.begin()
    ranks.send("abcd", flush=False)
    assert ranks.send("ab", seed=2, note=RefitNote("another"), lost=0) == (False, None)
    assert ranks.end()[1] is None
    assert ranks.state == "failed"
    assert ranks.send("abcd", seed=3, note=STEP) == (True, "v2")


@pytest.mark.parametrize("extent", [ALL, PARTIAL])
@pytest.mark.parametrize("came", ["", "ab"])
def test_the_end_of_a_session_ends_no_refit_of_another_client(ranks, came, extent):
    ranks.begin(RefitNote("a part", "v3", PARTIAL))
    if came:
        ranks.send(came, seed=3, flush=False)
    another = RefitNote("another", "v2", extent)
    assert ranks.send("abc", seed=2, flush=False, note=another) == (True, None)
    assert ranks.end()[1] is None
    assert ranks.state == ("mixed" if came else "open")
    told = ranks.send("d", seed=2, note=another)
    assert told == (True, "v2")


def test_nor_its_halves(ranks):
    another = RefitNote("another", "v2", PARTIAL)
    ranks.begin(RefitNote("a session"))
    assert ranks.send("ab", seed=2, flush=False, note=another) == (True, None)
    for manager in ranks.managers:
        half = Half("a.weight_scale_inv", torch.ones(1), None, manager.refit.ledger.stamp, True)
        manager.refit.pairs.halves["a"] = half
    assert ranks.end()[1] is None
    for manager in ranks.managers:
        del manager.refit.pairs.halves["a"]  # it is there, and its other half comes
    assert ranks.send("cd", seed=2, note=another) == (True, "v2")


def test_the_version_waits_for_a_session_that_nobody_ended(ranks):
    ranks.begin()
    assert ranks.send("abcd", note=STEP) == (True, None)
    assert ranks.state == "open"
    assert ranks.end() == (True, "v2")


def test_what_reaches_nothing_takes_no_version_away(ranks):
    ranks.begin()
    assert ranks.send("abcd", note=STEP) == (True, None)
    assert ranks.send(ROTARY) == (True, None)
    assert ranks.end() == (True, "v2")


# -- one request with several calls ----------------------------------------------------------------


@pytest.mark.parametrize("before", ["a stray call", "a NaN"])
def test_one_request_that_brings_all_is_whole_whatever_came_before(ranks, before):
    assert ranks.ipc("ab", "cd", seed=1, version="v1") == (True, "v1")
    if before == "a NaN":
        bad = [[("a.weight", torch.full((6, 4), float("nan")))], tensors("bcd", 9)]
        request = SimpleNamespace(buckets=bad, rid=None, weight_version=None, flush_cache=True)
        assert not ranks.told(lambda one: one.update_weights_from_ipc(request))[0]
    else:
        ranks.send("a", seed=9, flush=False)
    assert ranks.ipc("ab", "cd", seed=2, version="v2") == (True, "v2")
    assert ranks.state == "whole"
    assert ranks.holds(2)


# -- drafts ----------------------------------------------------------------------------------------


def test_the_last_call_of_a_named_refit_may_be_for_the_draft(ranks):
    for letters in ("ab", "cd"):
        assert ranks.send(letters, flush=False, note=STEP) == (True, None)
    assert ranks.send("", note=STEP, selector="draft") == (True, "v2")
    assert ranks.state == "whole"


@pytest.mark.parametrize("order", [["draft", "abcd"], ["bc", "draft", "ad"]], ids="-".join)
def test_a_draft_of_the_same_refit_may_come_before_its_target(ranks, order):
    for at, letters in enumerate(order):
        is_last, selector = at == len(order) - 1, "target"
        if letters == "draft":
            letters, selector = "a", "draft"
        told = ranks.send(letters, seed=2, flush=is_last, note=STEP, selector=selector)
        assert told == (True, "v2" if is_last else None)
    assert ranks.state == "whole"


def test_the_version_of_a_session_may_come_with_the_draft(ranks):
    ranks.begin()
    ranks.send("abcd", flush=False, selector="target")
    ranks.send("", version="v3", selector="draft")
    assert ranks.end() == (True, "v3")


@pytest.mark.parametrize("name", [None, RefitNote("a session")])
def test_or_with_a_draft_that_comes_before_all_else(ranks, name):
    ranks.begin(name)
    ranks.send("", version="v3", selector="draft", flush=False)
    ranks.send("", version="v4", selector="draft", flush=False, lost=0)  # it failed
    ranks.send("abcd", flush=False, selector="target")
    assert ranks.end() == (True, "v3")


@pytest.mark.parametrize("extent", [ALL, PARTIAL])
def test_a_session_without_a_name_ends_the_refit_that_its_requests_name(ranks, extent):
    ranks.begin()
    for letters in ("ab", "cd"):
        note = RefitNote("step", "v2", extent)
        assert ranks.send(letters, flush=False, note=note) == (True, None)
    assert ranks.end() == (True, "v2")
    assert ranks.state == "whole"


def test_the_version_waits_for_what_a_draft_of_any_rank_lost(ranks, monkeypatch):
    lost = {"fc.weight"}

    def lost_of_drafts():
        return sorted(lost) if getattr(HERE, "rank", 0) == 1 else []

    for module in (log, refit_end, status):
        monkeypatch.setattr(module, "lost_of_drafts", lost_of_drafts)
    assert ranks.send("abcd", note=STEP, selector="target") == (True, None)
    assert ranks.state == "unloaded"
    lost.clear()
    assert ranks.send("", selector="draft") == (True, "v2")
    assert ranks.state == "whole"
