"""Every fault of the table, one after the other, on one server: told, survived, in the status, mended."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path

import pytest
from support.engine.models import checkpoint
from support.faults.fault import Fault, Then
from support.faults.table import FAULTS
from support.faults.trainer import ServerTrainer
from support.server.served import (
    HAS_SESSIONS,
    MODEL,
    ONE_THREAD,
    QUANTIZED,
    Client,
    ClientWithoutSessions,
)

from sglang_fp8rl.errors import RefitError
from sglang_fp8rl.trainer import fingerprint_of
from sglang_fp8rl.wire.fingerprint import Fingerprint, compare
from sglang_fp8rl.wire.plan import RefitPlan

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300), pytest.mark.xdist_group("server")]

_plans: dict[str, RefitPlan] = {}
_expected: dict[tuple[str, str], Fingerprint] = {}


@dataclass
class Case:
    """The server, and who sends to it. `which` weights are served when a fault comes."""

    client: Client
    directory: Path
    which: str

    @property
    def other(self) -> str:
        return "second" if self.which == "first" else "first"

    def trainer(self) -> ServerTrainer:
        old, new = getattr(MODEL, self.which), getattr(MODEL, self.other)
        return ServerTrainer(self.client.url, old, new, self.directory)

    def differing(self, which: str) -> set[str]:
        """Names that are not served as that weight set has them, by the fingerprint."""
        url = self.client.url
        if url not in _plans:
            _plans[url] = self.client.plan()
        if (url, which) not in _expected:
            weights = getattr(MODEL, which).items()
            _expected[url, which] = fingerprint_of(weights, _plans[url])
        found = compare(self.client.fingerprint(), _expected[url, which])
        assert not found.unproven
        assert not found.missing
        return set(found.differing)

    def full(self, which: str) -> None:
        """One full good update in the plainest way there is."""
        ClientWithoutSessions(self.client.url).update(getattr(MODEL, which).items())


_served: dict[str, str] = {}


@pytest.fixture
def case(server, checkpoint_dir, tmp_path) -> Case:
    url = server(checkpoint(checkpoint_dir, MODEL, "first"), QUANTIZED, env=ONE_THREAD).url
    case = Case(Client(url), tmp_path, _served.pop(url, ""))
    if not case.which:  # another file's test had it last, or a fault was not mended
        case.which = "first"
        end_open_session(case)
        with contextlib.suppress(RefitError):  # halves of a row that does not hold yet
            case.full("first")
        case.full("first")
        assert case.differing("first") == set()
    return case


@pytest.fixture(scope="module", autouse=True)
def _the_first_weights_afterwards(server, checkpoint_dir):
    yield
    url = server(checkpoint(checkpoint_dir, MODEL, "first"), QUANTIZED, env=ONE_THREAD).url
    Client(url).update(MODEL.first.items(), verify=True)


def end_open_session(case: Case) -> None:
    if HAS_SESSIONS and "session is open" in " ".join(case.client.status()["problems"]):
        case.client.close_session()


def rows() -> list[object]:
    return [pytest.param(fault, id=fault.id, marks=marks_of(fault)) for fault in FAULTS]


def marks_of(fault: Fault) -> list[pytest.MarkDecorator]:
    if fault.needs_sessions and not HAS_SESSIONS:
        return [pytest.mark.skip(reason="this SGLang has no sessions")]
    return []


@pytest.mark.parametrize("fault", rows())
def test_a_fault_is_told_survived_and_mended(case, fault):
    trainer = case.trainer()
    answer = fault.act(trainer)
    assert (answer.code, *missing_words(fault, answer.text)) == (fault.code,), answer
    assert len(case.client.generate([1, 2, 3])["meta_info"]["output_token_logprobs"]) == 4
    check_status(case, fault)
    changed = case.differing(case.which)
    is_half_stored = fault.then_here is not None
    if fault.serves is None or is_half_stored:
        assert changed
        assert case.differing(case.other)
    else:
        assert changed == set(fault.serves)
    end_open_session(case)
    case.full(case.other)
    assert case.differing(case.other) == set()
    check_whole(case)
    _served[case.client.url] = case.other


def missing_words(fault: Fault, text: str) -> list[str]:
    return [word for word in (*fault.told, fault.about) if word not in text]


def check_status(case: Case, fault: Fault) -> None:
    status = case.client.status()
    then = fault.then_here or fault.then
    assert status["state"] == then.value, status["problems"]
    assert status["consistent"] == (then is Then.WHOLE), status["problems"]
    assert bool(status["problems"]) != status["consistent"]


def check_whole(case: Case) -> None:
    status = case.client.status()
    assert (status["consistent"], status["problems"]) == (True, [])
    assert status["last_refit"]["outcome"] == "ok"
    assert status["last_refit"]["complete"]


def test_the_table_has_at_least_sixty_faults_of_different_names():
    assert len({fault.id for fault in FAULTS}) == len(FAULTS) >= 60
