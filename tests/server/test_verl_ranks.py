"""veRL's adapter against a server that keeps a list: what it asks, and that no rank is left waiting."""

from __future__ import annotations

import base64
import json
from email.message import Message
from types import SimpleNamespace
from typing import Any

import pytest
from support.engine.models import checkpoint
from support.json_server import JsonServer
from support.plans import make_plan
from support.server.served import MODEL
from support.server.verl_ranks import WORLD_SIZE, Trainer

from sglang_fp8rl.wire import layout_text
from sglang_fp8rl.wire.plan import PLAN_PATH
from sglang_fp8rl.wire.refit_note import note_of

pytestmark = [pytest.mark.engine, pytest.mark.timeout(1200), pytest.mark.xdist_group("server")]

UPDATE = "/update_weights_from_tensor"
PLAN, OTHER_PLAN = make_plan({}), make_plan({}, use_weight_pow2_scale=True)
SERVED_ACTOR = "sglang_fp8rl.verl_rollout.served_actor"
NAMES = sorted(MODEL.first)


class Listed(JsonServer):
    """A server of this package, or a plain one, which answers everything and serves nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.port = self.server_port
        self.expect()

    def expect(
        self,
        *,
        is_ours: bool = True,
        has_sessions: bool = True,
        refuses: str = "",
        good: int = 0,
        reads_tags: bool = True,
    ) -> None:
        """Begin a new list; `refuses` one endpoint, after `good` requests that it took.

        A proxy may drop the tag of a plan that is known: then `reads_tags` is False.
        """
        self.asked: list[tuple[str, dict]] = []
        self.is_ours, self.has_sessions = is_ours, has_sessions
        self.refuses, self.good, self.reads_tags = refuses, good, reads_tags

    def paths(self) -> list[str]:
        return [path for path, _ in self.asked]

    def reply_to(self, path: str, body: Any, headers: Message) -> tuple[int, Any]:
        self.asked.append((path, body or {}))
        if path == "/server_info":
            section = {"flat_layout": layout_text.VERSION} if self.is_ours else None
            return 200, {"tp_size": WORLD_SIZE, "internal_states": [{"fp8rl": section}]}
        if path == PLAN_PATH:
            known = self.reads_tags and headers["If-None-Match"] == f'"{PLAN.digest}"'
            return (304, b"") if known else (200, PLAN.document)
        if path.endswith("_weight_update") and not self.has_sessions:
            return 404, {"detail": "Not Found"}
        if path == self.refuses and self.paths().count(path) > self.good:
            return 400, {"success": False, "message": "it does not like this one"}
        return 200, {"success": True, "message": "fine"}


@pytest.fixture(scope="module")
def listed():
    with Listed() as server:
        yield server


@pytest.fixture(scope="module")
def trainer(tmp_path_factory):
    ranks = Trainer(tmp_path_factory.mktemp("ranks"))
    yield ranks
    ranks.close()


@pytest.fixture
def refit(listed, trainer, checkpoint_dir):
    """What each rank of one server says of a refit in several buckets."""
    case = SimpleNamespace(server=listed)

    def refit(**more) -> list[dict]:
        path = checkpoint(checkpoint_dir, MODEL, "second")
        more = {"by_adapter": True, "tp_size": 2, "step": 7, **more}
        trainer.start_refit(case, path, "float32", 300_000, **more)
        return [trainer.answer(rank) for rank in range(WORLD_SIZE)]

    return refit


def updates(listed: Listed) -> list[dict]:
    return [body for path, body in listed.asked if path == UPDATE]


def test_a_refit_is_one_session_that_announces_all(listed, refit):
    listed.expect()
    assert refit() == [{"answers": []}] * 2
    paths = listed.paths()
    assert paths.count(UPDATE) > 2
    ends = ["/end_weight_update", "/update_weight_version"]
    assert [path for path in paths if path != UPDATE][1:] == ["/begin_weight_update", *ends]
    note = note_of(dict(listed.asked)["/begin_weight_update"]["rid"])
    assert (note.version, note.extent) == ("7", "all")
    assert dict(listed.asked)["/update_weight_version"]["new_version"] == "7"
    assert not any("rid" in body for body in updates(listed))


def test_without_sessions_each_call_names_its_refit_and_the_last_says_so(listed, refit):
    listed.expect(has_sessions=False)
    assert refit() == [{"answers": []}] * 2
    sent = updates(listed)
    assert len(sent) > 2
    (note,) = {note_of(body["rid"]) for body in sent}
    assert (note.version, note.extent) == ("7", "all")
    assert [body["flush_cache"] for body in sent] == [False] * (len(sent) - 1) + [True]
    asked = [path for path in listed.paths() if path != UPDATE]
    assert asked[1:] == ["/begin_weight_update", "/update_weight_version"]


def test_a_plain_server_is_told_nothing_and_gets_no_layout_as_text(listed, refit):
    listed.expect(is_ours=False)
    assert refit() == [{"answers": []}] * 2
    assert not any("rid" in body for _, body in listed.asked)
    for body in updates(listed):
        assert len(body["serialized_named_tensors"]) == WORLD_SIZE
        for text in body["serialized_named_tensors"]:
            assert b"SimpleNamespace" in base64.b64decode(text)


@pytest.mark.parametrize("has_sessions", [True, False])
def test_the_user_s_config_may_say_that_a_refit_is_partial(listed, refit, has_sessions):
    listed.expect(has_sessions=has_sessions)
    assert refit(custom={"fp8rl_extent": "partial"}) == [{"answers": []}] * 2
    announcing = "/begin_weight_update" if has_sessions else UPDATE
    note = note_of(dict(listed.asked)[announcing]["rid"])
    assert note.extent == "partial"


def test_an_extent_that_nobody_knows_is_named_before_anything_is_sent(listed, refit):
    listed.expect()
    for said in refit(custom={"fp8rl_extent": "some"}):
        assert "rollout.custom.fp8rl_extent: 'some'" in said["error"]
    assert UPDATE not in listed.paths()


@pytest.fixture
def trains_by(tmp_path):
    """An actor that trains what is served, with that plan in its file."""

    def command(plan) -> dict:
        file = tmp_path / "plan.json"
        file.write_text(json.dumps(plan.document))
        return {"external_lib": SERVED_ACTOR, "plan_file": str(file)}

    return command


def test_an_actor_that_trains_by_another_plan_is_refused_on_every_rank(listed, refit, trains_by):
    listed.expect()
    for said in refit(**trains_by(OTHER_PLAN)):
        for words in ("plan.json", PLAN.digest, OTHER_PLAN.digest, "other options", "--options"):
            assert words in said["error"]
    assert listed.paths() == [PLAN_PATH]


@pytest.mark.parametrize("reads_tags", [True, False])
def test_an_actor_s_plan_is_compared_once_and_the_server_s_goes_on(
    listed, refit, trains_by, reads_tags
):
    listed.expect(reads_tags=reads_tags)
    assert refit(**trains_by(PLAN), times=2) == [{"answers": []}] * 2
    assert listed.paths().count("/end_weight_update") == 2
    assert [path for path in listed.paths() if path == PLAN_PATH] == listed.paths()[:1]


def test_an_actor_whose_plan_s_file_is_gone_is_refused_on_every_rank(listed, refit):
    listed.expect()
    for said in refit(external_lib=SERVED_ACTOR, plan_file="/nowhere"):
        assert "SGLANG_FP8RL_SERVED_PLAN: '/nowhere'" in said["error"]
    assert listed.paths() == []


@pytest.mark.parametrize("content", ["", '{"format": "sglang-fp8rl/plan",'])
def test_an_actor_whose_plan_s_file_is_no_json_is_refused_on_every_rank(
    listed, refit, tmp_path, content
):
    """`sglang-fp8rl plan MODEL > FILE` leaves an empty one where it fails."""
    listed.expect()
    file = tmp_path / "plan.json"
    file.write_text(content)
    for said in refit(external_lib=SERVED_ACTOR, plan_file=str(file)):
        assert f"SGLANG_FP8RL_SERVED_PLAN: {file}; it is the JSON that" in said["error"]
    assert listed.paths() == []


# What veRL sends by itself: buckets that it cuts, an adapter (whose server does not list it), deltas.
CUT_BY_VERL = {"model_type": "deepseek_v4"}
ADAPTER_OF_LORA = {"peft_config": {"r": 8}, "base_sync_done": True}
DELTAS = {"wire_format": "delta_flush", "as_flushes": True}
FAILURES = {
    "looking the server up": ({"fails": ["look-up"]}, {}, "Failed to look up actor"),
    "the first bucket": ({}, {"refuses": UPDATE}, "does not like"),
    "a later bucket": ({}, {"refuses": UPDATE, "good": 2}, "does not like"),
    "the version": ({}, {"refuses": "/update_weight_version"}, "does not like"),
    "the steps": ({"fails": ["steps"]}, {}, "the actor died"),
    "weights of the first rank": ({"is_broken": True, "raises_on": 0}, {}, "no memory"),
    "weights of the second rank": ({"is_broken": True, "raises_on": 1}, {}, "no memory"),
    "no weights on any rank": ({"is_empty": True}, {}, "an empty iterable on every rank"),
    "a rank with fewer weights": ({"is_broken": True, "ends_on": 1}, {}, "rank(s) [1] of 2"),
    "a plain server's bucket": ({}, {"is_ours": False, "refuses": UPDATE, "good": 1}, "400"),
    "a plain server's steps": ({"fails": ["steps"]}, {"is_ours": False}, "the actor died"),
    "a bucket without sessions": ({}, {"has_sessions": False, "refuses": UPDATE}, "does not like"),
    "the beginning": ({}, {"refuses": "/begin_weight_update"}, "does not like"),
    "the end": ({}, {"refuses": "/end_weight_update"}, "does not like"),
    "the first bucket of veRL's": (CUT_BY_VERL, {"refuses": UPDATE}, "400"),
    "the second bucket of veRL's": (CUT_BY_VERL, {"refuses": UPDATE, "good": 1}, "400"),
    "a LoRA adapter": (ADAPTER_OF_LORA, {}, "KeyError: 'data'"),
    "a plain server's delta": (DELTAS, {"is_ours": False, "refuses": UPDATE, "good": 1}, "400"),
}


@pytest.mark.parametrize("what", FAILURES)
def test_what_fails_on_one_rank_fails_on_all_and_the_next_refit_works(listed, refit, what):
    command, server, words = FAILURES[what]
    listed.expect(**server)
    said = [answer.get("error", "") for answer in refit(**command)]
    assert said[0].startswith("RefitError: "), said
    assert words in said[0]
    assert said == [said[0]] * WORLD_SIZE
    if (
        server.get("has_sessions", True)
        and "/begin_weight_update" in listed.paths()
        and server.get("refuses") != "/begin_weight_update"
    ):
        assert "/end_weight_update" in listed.paths(), "the server is left in a session"
    listed.expect()
    assert refit() == [{"answers": []}] * WORLD_SIZE
