"""The law of a refit against its model, on random runs of requests: states agree behind each of them."""

from __future__ import annotations

import random

import pytest
from test_refits import NAMES, Server

from sglang_fp8rl.engine.arrival.update import Origin, Update
from tools.fuzz.model_of_refits import ModelOfRefits


class Both:
    """A server's log and the model of it, told the same."""

    def __init__(self) -> None:
        self.server, self.model = Server(), ModelOfRefits(NAMES)

    def call(self, names: list[str], flush: bool, fault: str) -> None:
        in_session = self.model.in_session
        if fault == "unreadable":
            scope = Update(Origin.TENSOR, in_session, flush)
            self.server.law.fail(["no pickle"], scope)
            self.model.fail(flush)
            return
        self.server.call(*names, flush=flush, failed=fault == "nan", in_session=in_session)
        self.model.call(set(names), flush, is_refused=fault == "nan")

    def begin(self) -> None:
        if self.model.begin():
            self.server.law.begin_session(None)

    def end(self) -> None:
        if self.model.in_session:
            assert self.server.end_session() == self.model.end()

    def flush(self) -> None:
        law = self.server.law
        law.flushed(law.verdict_at_flush())
        self.model.flush()


@pytest.mark.parametrize("seed", range(20))
def test_states_are_the_model_s_whatever_clients_do(seed):
    chance = random.Random(seed)
    both = Both()
    for step in range(400):
        kind = chance.choices(["call", "begin", "end", "flush"], [20, 1, 3, 1])[0]
        if kind == "call":
            names = chance.sample(NAMES, chance.randint(1, len(NAMES)))
            fault = chance.choices(["", "nan", "unreadable"], [20, 1, 1])[0]
            both.call(names, chance.random() < 0.6, fault)
        else:
            getattr(both, kind)()
        assert both.server.log.state.value == both.model.state, (step, kind)
