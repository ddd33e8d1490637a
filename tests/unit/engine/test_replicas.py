"""A server with replicas: its status is that of the worst, its fingerprint names the one that differs."""

from __future__ import annotations

import itertools

import pytest

pytest.importorskip("sglang")

from sglang_fp8rl.engine.host.status import status_of_replicas
from sglang_fp8rl.engine.law.record import State
from sglang_fp8rl.engine.proof.extension import Held, Rank, fingerprint_of_ranks, of_replicas
from sglang_fp8rl.wire.fingerprint import Fingerprint, Number

WORST_FIRST = ["failed", "unloaded", "mixed", "open", "whole"]


def section(replica: int, state: str, *, cache_flushed: bool | None = None) -> dict:
    last = {"outcome": "ok", "cache_flushed": cache_flushed}
    return {
        "replica": replica,
        "state": state,
        "consistent": state == "whole",
        "last_refit": last,
    }


def test_every_state_has_its_place():
    assert set(WORST_FIRST) == {state.value for state in State}


@pytest.mark.parametrize(("worse", "better"), itertools.combinations(WORST_FIRST, 2))
@pytest.mark.parametrize("worse_is", [0, 1])
def test_one_replica_that_is_worse_is_told_whichever_answers_first(worse, better, worse_is):
    bad, good = section(worse_is, worse), section(1 - worse_is, better)
    for answers in ([bad, good], [good, bad]):
        assert status_of_replicas(answers) == {**bad, "replicas": 2}
        assert not status_of_replicas(answers)["consistent"]


def test_where_all_are_whole_it_is_the_first_s():
    answers = [section(2, "whole"), section(0, "whole"), section(1, "whole")]
    assert status_of_replicas(answers) == {**answers[1], "replicas": 3}


@pytest.mark.parametrize("refused_at", [0, 1])
def test_a_flush_that_one_replica_refused_is_not_hidden_by_another(refused_at):
    answers = [section(rank, "whole", cache_flushed=rank != refused_at) for rank in range(2)]
    for order in (answers, answers[::-1]):
        assert status_of_replicas(order)["last_refit"]["cache_flushed"] is False


def test_a_single_replica_s_status_is_its_own():
    alone = {**section(0, "whole"), "last_refit": None}
    assert status_of_replicas([alone]) == {**alone, "replicas": 1}


@pytest.mark.parametrize("order", itertools.permutations(range(3)))
def test_a_replica_that_differs_is_named_by_its_rank_whichever_answers_first(order):
    def document(rank: int) -> dict:
        weight = Number("bfloat16", 7 + (rank == 2))
        return Fingerprint("", {"w": weight, "v": Number("bfloat16", 1)}).as_dict()

    found = of_replicas({rank: document(rank) for rank in order})
    assert found["tensors"] == document(0)["tensors"]
    assert list(found["differing"]) == ["w"]
    assert "dp_rank 2" in found["differing"]["w"]
    assert "dp_rank 1" not in found["differing"]["w"]


@pytest.mark.parametrize("order", itertools.permutations(range(2)))
def test_what_one_replica_can_not_prove_is_not_proven(order):
    weight = {"w": Number("bfloat16", 7)}
    documents = {
        0: Fingerprint("", weight).as_dict(),
        1: Fingerprint("", {}, unproven={"w": "served in several forms"}).as_dict(),
    }
    found = of_replicas({rank: documents[rank] for rank in order})
    assert found["tensors"] == {}
    assert found["unproven"] == {"w": "dp_rank 1: served in several forms"}


def test_a_tensor_without_elements_is_unproven_and_the_others_are_not_lost():
    found = fingerprint_of_ranks([Rank(held={"empty": Held((0, 4))})] * 2)
    assert found.unproven == {"empty": "no rank holds any of it"}
