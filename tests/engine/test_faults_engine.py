"""The bytes law for a sample of the fault table: after a fault and one full update, an engine has every
byte of a fresh load, derived copies included. (On the server the fingerprint says so, for all rows.)"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from support.engine.commands import begin, digests, end, send, status, update_from_disk
from support.engine.engine_host import EngineHost
from support.engine.models import MODELS
from support.engine.pool import on
from support.faults.fault import Fault
from support.faults.table import FAULTS
from support.faults.trainer import Answer, Trainer
from support.server.served import HAS_SESSIONS

pytestmark = [pytest.mark.engine, on("qwen3-tp1", "qwen3-tp2")]

MODEL = MODELS["qwen3"]
EVERY = 9  # of the rows; all of them in `test-all`


@dataclass
class EngineTrainer(Trainer):
    """Without HTTP: requests as the scheduler gets them."""

    host: EngineHost | None = None

    @property
    def ranks(self) -> int:
        assert self.host is not None
        return self.host.tp_size

    def payload(
        self, payloads: list[str], load_format: str | None = None, flush: bool = True
    ) -> Answer:
        assert self.host is not None
        for_ranks = payloads * self.host.tp_size if len(payloads) == 1 else payloads
        return self._answer(send, for_ranks, load_format, flush)

    def begin(self) -> Answer:
        return self._answer(begin)

    def end(self) -> Answer:
        return self._answer(end)

    def disk(self, path: Path) -> Answer:
        return self._answer(update_from_disk, str(path))

    def _answer(self, *call: Any) -> Answer:
        assert self.host is not None
        success, message = self.host.call(*call)
        return Answer(200 if success else 400, message)


def rows() -> list[object]:
    possible = [
        fault
        for fault in FAULTS
        if not fault.needs_server and (HAS_SESSIONS or not fault.needs_sessions)
    ]
    return [
        pytest.param(fault, id=fault.id, marks=[pytest.mark.slow] if at % EVERY else [])
        for at, fault in enumerate(possible)
    ]


@pytest.mark.parametrize("fault", rows())
def test_after_a_fault_one_full_update_gives_the_bytes_of_a_fresh_load(
    host, tmp_path, fault: Fault
):
    trainer = EngineTrainer(MODEL.first, MODEL.second, tmp_path, host=host)
    answer = fault.act(trainer)
    assert answer.code == fault.code, answer
    if any("session is open" in problem for problem in host.call(status)["problems"]):
        trainer.end()
    host.send(list(MODEL.second.items()))
    assert host.call_all(digests) == host.fresh("second").digests
    state = host.call(status)
    assert (state["consistent"], state["problems"]) == (True, [])
