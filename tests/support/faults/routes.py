"""The package's own routes, asked wrongly."""

from __future__ import annotations

from sglang_fp8rl.wire.fingerprint import FINGERPRINT_PATH
from sglang_fp8rl.wire.plan import PLAN_PATH, STATUS_PATH

from .fault import Group, Then
from .trainer import Answer, ServerTrainer

GROUP = Group("The package's own routes", needs_server=True)
row = GROUP.row


@row(code=405, then=Then.WHOLE)
def a_fingerprint_that_is_posted(trainer: ServerTrainer) -> Answer:
    return trainer.post(FINGERPRINT_PATH, {"name": "x"})


@row(code=405, then=Then.WHOLE)
def a_plan_that_is_posted(trainer: ServerTrainer) -> Answer:
    return trainer.post(PLAN_PATH, {})


@row(code=405, then=Then.WHOLE)
def a_status_that_is_deleted(trainer: ServerTrainer) -> Answer:
    return trainer.http("DELETE", STATUS_PATH)


@row(code=404, then=Then.WHOLE)
def a_route_that_is_not_there(trainer: ServerTrainer) -> Answer:
    return trainer.http("GET", "/fp8rl/nothing")


@row("sglang-fp8rl/plan", code=200, then=Then.WHOLE)
def a_plan_asked_for_with_a_digest_that_is_none(trainer: ServerTrainer) -> Answer:
    """Whoever has another plan gets this one."""
    return trainer.http("GET", PLAN_PATH, headers={"If-None-Match": '"\x7f not a digest'})


@row("sglang-fp8rl/fingerprint", code=200, then=Then.WHOLE)
def a_fingerprint_with_arguments_that_nobody_knows(trainer: ServerTrainer) -> Answer:
    return trainer.http("GET", FINGERPRINT_PATH, params={"name": "'; --", "rank": "-1"})


@row("consistent", code=200, then=Then.WHOLE)
def a_status_with_arguments_that_nobody_knows(trainer: ServerTrainer) -> Answer:
    return trainer.http("GET", STATUS_PATH, params={"rank": "x" * 4000})
