"""Random runs of good, bad, partial, interleaved and aborted requests on a real engine.

After every request the engine's fingerprint is the one of a simple model of the bytes (`model_of_bytes.py`),
and what it answers and its status says is what a simple model of the law expects (`model_of_refits.py`).
"""

from __future__ import annotations

from pathlib import Path

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from sglang_fp8rl.lab.testing.checkpoints import save_checkpoint
from sglang_fp8rl.versions import HAS_SESSIONS
from support.engine.commands import status
from support.engine.machine_commands import (
    FAULTS,
    FP8_NAMES,
    MODEL,
    NAMES,
    VERSIONS,
    Look,
    Step,
    perform,
    version,
)
from support.engine.model_of_bytes import ModelOfBytes
from support.engine.model_of_refits import ModelOfRefits
from support.engine.pool import Engine

numbers = st.integers(0, VERSIONS - 1)
forms = st.sampled_from(("list", "flat", "bf16", "pairs"))
some_names = st.lists(st.sampled_from(NAMES), min_size=1, max_size=6, unique=True).map(tuple)


class RefitMachine(RuleBasedStateMachine):
    """Rules are what clients do. `machine_on` says which engine."""

    engine: Engine
    directory: Path
    steps = 0

    @initialize()
    def start(self) -> None:
        """From the first weights, whole."""
        self.bytes, self.refits = ModelOfBytes(), ModelOfRefits(NAMES)
        self.full(0, "flat", 1, 0, in_session=False)

    def step(self, step: Step, is_expected_to_succeed: bool) -> Look:
        type(self).steps += 1
        look = self.engine.call(perform, step)
        assert look.success == is_expected_to_succeed, (step, look.message)
        assert look.success or look.message, step
        expected = self.bytes.numbers()
        wrong = [name for name, number in expected.items() if look.numbers[name] != number]
        assert not wrong, (step, look.message, wrong)
        said = look.status
        assert said["state"] == self.refits.state, (step, vars(self.refits), said)
        assert said["consistent"] == (not said["problems"]) == (self.refits.state == "whole"), said
        return look

    def call(self, step: Step) -> Look:
        self.bytes.call(step)
        names, wrong = set(step.names), step.names[step.at]
        if step.fault in ("pickle", "layout"):
            return self.step(step, self.refits.fail(step.flush))
        if step.fault == "empty":
            names = set()
        halves = {wrong} if step.fault == "half" else set()
        is_refused = step.fault in ("empty", "nan", "shape", "unknown")
        succeeds = self.refits.call(names, step.flush, is_refused=is_refused, halves=halves)
        return self.step(step, succeeds)

    @rule(
        number=numbers,
        form=forms,
        parts=st.integers(1, 3),
        first=st.integers(0, len(NAMES) - 1),
        in_session=st.booleans(),
    )
    def full(self, number: int, form: str, parts: int, first: int, in_session: bool) -> None:
        """A whole refit, in any buckets, order and form; whatever came before, all is well after it.

        Of a client that names nothing it may cost one, where what was left behind and its first calls add up.
        """
        in_session = in_session and HAS_SESSIONS and not self.refits.in_session
        if in_session:
            self.begin()
        order = NAMES[first:] + NAMES[:first]
        self.send_all(order, parts, number, form, always=False)
        if in_session:
            self.step(Step("end"), self.refits.end())
        elif self.refits.state != "whole":
            self.send_all(order, parts, number, form, always=False)
        self.is_whole()

    @rule(number=numbers, form=st.sampled_from(("list", "flat", "bf16")))
    def flushing(self, number: int, form: str) -> None:
        """A client that asks for the flush with every call, behind one of the cache alone."""
        self.flush()
        self.send_all(NAMES, 3, number, form, always=True)
        self.is_whole()

    @rule()
    def flush(self) -> None:
        """Of the cache alone: the refit of a client that names nothing ends there."""
        self.step(Step("flush"), self.refits.flush())

    def send_all(
        self, order: tuple[str, ...], parts: int, number: int, form: str, *, always: bool
    ) -> None:
        """Of one version, in so many calls. Half of one is never said to be whole, unless it adds up to one of
        each with calls of other clients that name nothing."""
        is_alone = self.refits.in_session or not self.refits.calls or self.refits.is_done
        size = -(-len(order) // parts)
        for at in range(0, len(order), size):
            is_last = at + size >= len(order)
            step = Step("call", order[at : at + size], number, form, flush=always or is_last)
            look = self.call(step)
            assert is_last or not is_alone or look.status["state"] != "whole", step

    def is_whole(self) -> None:
        """It was a whole refit, unless it belongs to a session that goes on."""
        if not self.refits.in_session:
            said = self.engine.call(status)
            assert said["state"] == "whole", said["problems"]
            assert said["last_refit"]["outcome"] == "ok"
            assert said["last_refit"]["complete"]

    @rule(names=some_names, number=numbers, form=forms, flush=st.booleans())
    def part(self, names: tuple[str, ...], number: int, form: str, flush: bool) -> None:
        """A few tensors: of a refit that goes on, of one that ends here, or of a second client."""
        self.call(Step("call", names, number, form, flush))

    @rule(
        names=some_names,
        number=numbers,
        fault=st.sampled_from(FAULTS),
        at=st.integers(0, 5),
        is_flat=st.booleans(),
        flush=st.booleans(),
    )
    def bad(
        self, names: tuple[str, ...], number: int, fault: str, at: int, is_flat: bool, flush: bool
    ) -> None:
        """A call with one mistake in it, or half of a pair."""
        at %= len(names)
        form = "flat" if is_flat or fault == "layout" else "list"
        if fault == "half":
            form, half = "pairs", FP8_NAMES[at]
            names = (*(name for name in names if name != half), half)
            at = len(names) - 1
        self.call(Step("call", names, number, form, flush, fault, at))

    @precondition(lambda self: HAS_SESSIONS)
    @rule()
    def begin(self) -> None:
        """Also inside a session that is open: refused, and the open one goes on."""
        self.step(Step("begin"), self.refits.begin())

    @precondition(lambda self: HAS_SESSIONS)
    @rule()
    def end(self) -> None:
        """Also of a session that nobody opened: refused."""
        self.step(Step("end"), self.refits.end())

    @precondition(lambda self: not self.refits.in_session)
    @rule(number=numbers)
    def disk(self, number: int) -> None:
        path = self.directory / f"version-{number}"
        if not path.exists():
            save_checkpoint(path, MODEL.config, version(number))
        self.bytes.store(NAMES, number)
        self.step(Step("disk", version=number, path=str(path)), self.refits.disk())

    def teardown(self) -> None:
        """The engine takes a whole refit and is what it was when it was loaded, byte for byte."""
        if not hasattr(self, "refits"):
            return
        if self.refits.in_session:
            self.engine.call(perform, Step("end"))
        self.engine.restore()


def machine_on(engine: Engine, directory: Path) -> type[RefitMachine]:
    """The machine for one engine; counts its steps anew."""
    return type(
        "RefitMachine", (RefitMachine,), {"engine": engine, "directory": directory, "steps": 0}
    )
