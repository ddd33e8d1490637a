"""The version of the weights travels to the scheduler and back with one request, and moves once."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("sglang")

from sglang_fp8rl.config import QUANTIZATION_METHOD
from sglang_fp8rl.engine.arrival.update import Origin, Update
from sglang_fp8rl.engine.host.boundary import Boundary
from sglang_fp8rl.engine.host.weight_version import with_whole_version
from sglang_fp8rl.engine.law.law import Law
from sglang_fp8rl.engine.law.refit_end import RefitEnd
from sglang_fp8rl.engine.ledger.ledger import Ledger
from sglang_fp8rl.engine.model.landings import NameTable
from sglang_fp8rl.wire.refit_note import RefitNote, apart_from_versions, note_of, with_version


class Manager:
    """SGLang's tokenizer manager, as far as it is asked; it can't ask a scheduler."""

    def __init__(self, replicas: int = 1) -> None:
        self.model_config = SimpleNamespace(quantization=QUANTIZATION_METHOD)
        self.server_args = SimpleNamespace(dp_size=replicas)
        self.version = "default"

    def _update_weight_version_if_provided(self, version):
        self.version = version


def answer(message: str, version: str | None) -> str:
    """What a scheduler says behind a refit that moved to this version."""
    law = Law(SimpleNamespace(ledger=Ledger([], NameTable())))
    law.log.moved_to, law.log.is_unloaded = version, False
    refit: Any = SimpleNamespace(extensions=[law])
    end = RefitEnd(Boundary(None), None, refit, Update(Origin.TENSOR), None)
    told = end._told(None)
    assert law.log.moved_to is None  # it is said once
    return with_version(message, told)


def ask(manager: Manager, success: bool, messages: list[str], *more, **fields):
    request = SimpleNamespace(rid=None, **fields)

    async def original(of, asked):
        assert (of, asked) == (manager, request)
        return (success, " | ".join(messages), *more)

    return asyncio.run(with_whole_version(original, manager, request)), request


@pytest.mark.parametrize("version", ["7", "", 'a "step" | \x1f', "Schritt ä"])
def test_a_version_comes_back_as_it_was_sent_and_nothing_of_how_is_seen(version):
    manager = Manager()
    (success, message, paused), request = ask(
        manager, True, [answer("Success", version)], 0, weight_version=version
    )
    assert (manager.version, success, paused) == (version, True, 0)
    assert message == f"Success Weight version updated to {version}."
    assert apart_from_versions(request.rid) == ("", [version])
    assert request.weight_version is None


def test_an_update_that_is_not_whole_leaves_the_version():
    manager = Manager()
    (_, message), _ = ask(manager, True, [answer("Success", None)], weight_version="7")
    assert (manager.version, message) == ("default", "Success")


def test_the_end_of_a_session_asks_no_scheduler_again():
    manager = Manager()
    assert ask(manager, True, [answer("Success", "8")])[0] == (
        True,
        "Success Weight version updated to 8.",
    )
    assert manager.version == "8"


def test_weights_that_are_whole_have_their_version_though_the_flush_was_refused():
    manager = Manager()
    ask(manager, False, [answer("not flushed", "8")])
    assert manager.version == "8"


@pytest.mark.parametrize(
    ("success", "versions"),
    [(False, ["8", None]), (True, ["8", None]), (True, ["8", "9"])],
    ids=["one fails", "one is not whole", "differ"],
)
def test_replicas_that_differ_are_of_no_version(success, versions):
    manager = Manager(replicas=2)
    ask(manager, success, [answer("Success", one) for one in versions], 0)
    assert manager.version == "default"


def test_a_replica_that_refused_says_nothing():
    manager = Manager(replicas=2)
    ask(manager, False, [answer("Success", "8"), "no session is open"], 0)
    assert manager.version == "default"


def test_replicas_that_agree_are_of_that_version():
    manager = Manager(replicas=2)
    (_, message, paused), _ = ask(manager, True, [answer("Success", "8")] * 2, [0, 0])
    assert (manager.version, message, paused) == (
        "8",
        "Success | Success Weight version updated to 8.",
        [0, 0],
    )


@pytest.mark.parametrize(
    "rid", [None, "", "a request", "{", RefitNote("a", "step-1", "all").to_text()]
)
@pytest.mark.parametrize("version", ["7", "", 'a "version"'])
def test_a_version_goes_beside_whatever_a_request_is_called(rid, version):
    found, versions = apart_from_versions(with_version(rid, version))
    assert (found, versions) == (rid or "", [version])
    assert note_of(found) == note_of(rid)


@pytest.mark.parametrize("rid", [None, "", '{"other": 1}', ["a", "b"]])
def test_any_other_request_has_no_version(rid):
    assert apart_from_versions(rid) == (rid, [])
