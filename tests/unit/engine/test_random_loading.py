"""As `test_observed_loading.py`, of models that nobody thought of (`tools/random_loading`)."""

from __future__ import annotations

from collections import Counter

import pytest
from support.replayed import replay_of

from sglang_fp8rl.engine.proof.extension import Fingerprints
from tools.random_loading.judge import run


# A program that counts its loads; a tensor that is overwritten behind its loader; codes that are made anew before
# their loader runs.
@pytest.mark.parametrize("seed", [1357, 1715, 2695])
def test_what_was_found_once_is_found_no_more(seed):
    run(seed)


# What a thread raises is told by the update.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("first", range(0, 200, 50))
def test_every_update_leaves_what_it_determines_whatever_went_before(first):
    found = [run(seed) for seed in range(first, first + 50)]
    outcomes = sum((one.outcomes for one in found), Counter[str]())
    # Else it says nothing.
    assert outcomes["whole"] > 8
    assert outcomes["refused again"] > 5
    assert any(replay_of(one.refit).counts.calls for one in found)
    assert any(replay_of(one.refit).counts.native_reasons for one in found)


def test_a_fingerprint_answers_where_a_scalar_lands_in_fp8_and_again_from_the_same_places():
    one = run(1005)
    proof = Fingerprints(one.refit)
    held, made = proof.rank().held, proof.made
    assert proof.rank().held == held
    assert proof.made is made  # the same places, read again
    assert any(
        len(known.shape) < 2 and "fewer than two dimensions" in held[name].reason
        for name, known in one.refit.names.known.items()
    )
