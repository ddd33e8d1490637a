"""The package's own routes, asked wrongly."""

from __future__ import annotations

from typing import Any

from sglang_fp8rl.wire.fingerprint import FINGERPRINT_PATH
from sglang_fp8rl.wire.plan import PLAN_PATH, STATUS_PATH

from .fault import Group, Then

GROUP = Group("The package's own routes", needs_server=True)
row = GROUP.row


def asked(word: str, method: str, path: str, code: int, *told: str, **options: Any) -> None:
    """A row for one request, which leaves the weights alone."""
    row(*told, code=code, then=Then.WHOLE, word=word)(
        lambda trainer: trainer.http(method, path, **options)
    )


asked("a_fingerprint_that_is_posted", "POST", FINGERPRINT_PATH, 405, json={"name": "x"})
asked("a_plan_that_is_posted", "POST", PLAN_PATH, 405, json={})
asked("a_status_that_is_deleted", "DELETE", STATUS_PATH, 405)
asked("a_route_that_is_not_there", "GET", "/fp8rl/nothing", 404)
# Whoever has another plan gets this one.
asked(
    "a_plan_asked_for_with_a_digest_that_is_none",
    *("GET", PLAN_PATH, 200, "sglang-fp8rl/plan"),
    headers={"If-None-Match": '"\x7f not a digest'},
)
asked(
    "a_fingerprint_with_arguments_that_nobody_knows",
    *("GET", FINGERPRINT_PATH, 200, "sglang-fp8rl/fingerprint"),
    params={"name": "'; --", "rank": "-1"},
)
asked(
    "a_status_with_arguments_that_nobody_knows",
    *("GET", STATUS_PATH, 200, "consistent"),
    params={"rank": "x" * 4000},
)
