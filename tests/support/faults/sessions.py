"""Sessions, and refits that end before they are whole."""

from __future__ import annotations

from collections.abc import Iterator

from sglang_fp8rl.wire.bucket import NamedTensor

from .fault import Group, Then
from .trainer import DOWN, HEAD, NORM, QUERY, UP, Answer, Trainer

GROUP = Group("Sessions, and refits that are not whole")
row = GROUP.row
SOME = (DOWN, UP, QUERY)


@row("session is already open", then=Then.OPEN, needs_sessions=True)
def a_session_inside_a_session(trainer: Trainer) -> Answer:
    assert trainer.begin().code == 200
    return trainer.begin()


@row("no weight-update session is open", host=True, then=Then.WHOLE, needs_sessions=True)
def the_end_of_a_session_that_nobody_opened(trainer: Trainer) -> Answer:
    return trainer.end()


@row("no weight-update session is open", host=True, then=Then.WHOLE, needs_sessions=True)
def a_session_that_is_ended_twice(trainer: Trainer) -> Answer:
    assert trainer.begin().code == 200
    assert trainer.end().code == 200
    return trainer.end()


@row(code=200, then=Then.WHOLE, needs_sessions=True)
def a_session_with_nothing_in_it(trainer: Trainer) -> Answer:
    assert trainer.begin().code == 200
    return trainer.end()


@row(code=200, then=Then.OPEN, serves=SOME, needs_sessions=True)
def a_session_that_nobody_ends(trainer: Trainer) -> Answer:
    """Its client died after a few tensors."""
    assert trainer.begin().code == 200
    return trainer.send(*map(trainer.fresh, SOME), flush=False)


@row("left out", code=200, then=Then.MIXED, serves=SOME, needs_sessions=True)
def a_session_that_ends_after_a_few_tensors(trainer: Trainer) -> Answer:
    assert trainer.begin().code == 200
    assert trainer.send(*map(trainer.fresh, SOME), flush=False).code == 200
    return trainer.end()


@row("FP8 without its scale", about=UP, needs_sessions=True)
def a_session_that_ends_with_half_of_a_pair(trainer: Trainer) -> Answer:
    assert trainer.begin().code == 200
    assert trainer.send(trainer.pair(UP)[0], flush=False).code == 200
    return trainer.end()


@row("a scale without its FP8 weight", about=f"{UP}_scale_inv", needs_sessions=True)
def halves_of_a_pair_in_two_sessions(trainer: Trainer) -> Answer:
    codes, scale = trainer.pair(UP)
    assert trainer.begin().code == 200
    assert trainer.send(codes, flush=False).code == 200
    assert trainer.end().code == 400
    assert trainer.begin().code == 200
    assert trainer.send(scale, flush=False).code == 200
    return trainer.end()


@row("of this session failed", then=Then.FAILED, serves=[UP], needs_sessions=True)
def a_session_that_goes_on_after_a_refused_call(trainer: Trainer) -> Answer:
    assert trainer.begin().code == 200
    assert trainer.send(trainer.broken(DOWN, slice(None), float("nan")), flush=False).code == 400
    assert trainer.send(trainer.fresh(UP), flush=False).code == 200
    return trainer.end()


@row("session is already open", then=Then.OPEN, serves=[UP], needs_sessions=True)
def two_clients_with_a_session_each(trainer: Trainer) -> Answer:
    """The second one is told; the first one's goes on."""
    assert trainer.begin().code == 200
    answer = trainer.begin()
    assert trainer.send(trainer.fresh(UP), flush=False).code == 200
    return answer


def refit_of(word: str, *names: str) -> None:
    """A row for a refit without a session; its only call asks for the flush, as a whole one does."""
    row(code=200, then=Then.MIXED, serves=names, word=word)(
        lambda trainer: trainer.send(*map(trainer.fresh, names))
    )


refit_of("a_refit_of_a_few_tensors", *SOME)
refit_of("a_refit_of_half_of_a_fused_weight", UP)
refit_of("a_refit_of_one_norm", NORM)


@row(code=200, then=Then.MIXED, serves=None)
def a_refit_of_every_fp8_weight_and_no_norm(trainer: Trainer) -> Answer:
    matrices = [item for item in trainer.new.items() if "proj" in item[0]]
    return trainer.send(*matrices)


@row(code=200, then=Then.MIXED, serves=None)
def a_refit_that_forgets_one_tensor(trainer: Trainer) -> Answer:
    return trainer.send(*(item for item in trainer.new.items() if item[0] != HEAD))


@row(code=200, then=Then.MIXED, serves=None)
def a_refit_that_forgets_one_layer(trainer: Trainer) -> Answer:
    return trainer.flat([item for item in trainer.new.items() if "layers.1." not in item[0]])


@row(code=200, then=Then.OPEN, serves=None)
def a_refit_whose_last_bucket_never_comes(trainer: Trainer) -> Answer:
    items = list(trainer.new.items())
    return trainer.send(*items[: len(items) // 2], flush=False)


def halves(trainer: Trainer) -> Iterator[list[NamedTensor]]:
    """Two clients that take turns: one sends the old weights, one the new ones."""
    names = list(trainer.new)
    for at in range(0, len(names), 8):
        yield [(name, trainer.new[name]) for name in names[at : at + 8]]
        yield [(name, trainer.old[name]) for name in names[at : at + 4]]


@row(code=200, then=Then.MIXED, serves=None)
def two_clients_without_sessions_that_take_turns(trainer: Trainer) -> Answer:
    for bucket in halves(trainer):
        assert trainer.send(*bucket, flush=False).code == 200
    return trainer.send((NORM, trainer.old[NORM]))
