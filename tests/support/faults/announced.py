"""Refits that do not bring what the client said of them."""

from __future__ import annotations

from sglang_fp8rl.errors import RefitError

from .fault import Group, Then
from .trainer import DOWN, NORM, QUERY, UP, Answer, ServerTrainer, said_by

GROUP = Group("What was announced", needs_server=True)
row = GROUP.row


@row("rid", "a note is")
def a_note_that_cannot_be_read(trainer: ServerTrainer) -> Answer:
    return trainer.noted('{"fp8rl_refit": 7}', trainer.fresh(DOWN))


@row("rid", "extent")
def a_note_with_an_extent_that_nobody_knows(trainer: ServerTrainer) -> Answer:
    return trainer.noted({"id": "a", "extent": "some"}, trainer.fresh(DOWN))


@row(code=200, then=Then.MIXED, serves=[DOWN])
def a_rid_that_is_not_a_note(trainer: ServerTrainer) -> Answer:
    return trainer.noted("request-17", trainer.fresh(DOWN))


@row("left out 18 parameter(s)", serves=[DOWN, UP])
def half_of_what_was_announced_as_all(trainer: ServerTrainer) -> Answer:
    note = {"id": "a", "extent": "all"}
    assert trainer.noted(note, trainer.fresh(DOWN), flush=False).code == 200
    return trainer.noted(note, trainer.fresh(UP))


@row("rid", "extent")
def a_note_that_lists_names(trainer: ServerTrainer) -> Answer:
    return trainer.noted({"id": "a", "extent": {"names": [DOWN]}}, trainer.fresh(DOWN))


@row(code=200, then=Then.MIXED, serves=[DOWN, UP, QUERY])
def two_clients_that_name_their_refits_and_take_turns(trainer: ServerTrainer) -> Answer:
    assert trainer.noted({"id": "a"}, trainer.fresh(DOWN), flush=False).code == 200
    assert trainer.noted({"id": "b"}, trainer.fresh(UP), flush=False).code == 200
    return trainer.noted({"id": "a"}, trainer.fresh(QUERY))


@row(code=200, then=Then.WHOLE, serves=[NORM])
def one_norm_that_was_declared_to_be_all_that_changed(trainer: ServerTrainer) -> Answer:
    """No fault: what does not come is still right, says the trainer."""
    return trainer.noted({"id": "a", "extent": "partial"}, trainer.fresh(NORM))


@row("left out", code=0, serves=None)
def a_trainer_that_forgets_half_of_its_weights(trainer: ServerTrainer) -> Answer:
    weights = list(trainer.new.items())
    return said_by(lambda: trainer.client().update(weights[: len(weights) // 2]), RefitError)
