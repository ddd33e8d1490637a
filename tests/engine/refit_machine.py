"""Random runs of good, bad, partial, interleaved and aborted requests on a real engine.

After every request the engine's fingerprint is the one of a simple model of the bytes, and its status says
what that model expects (`model_of_bytes.py`).
"""

from __future__ import annotations

from pathlib import Path

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from machine_commands import FAULTS, FP8_NAMES, MODEL, NAMES, VERSIONS, Look, Step, perform, version
from model_of_bytes import ModelOfBytes
from pool import Engine

from sglang_fp8rl.testing.checkpoints import save_checkpoint

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
        self.model = ModelOfBytes()
        self.full(0, "flat", 1, 0, in_session=False)

    def step(self, step: Step, is_expected_to_succeed: bool) -> Look:
        type(self).steps += 1
        look = self.engine.call(perform, step)
        assert look.success == is_expected_to_succeed, (step, look.message)
        assert look.success or look.message, step
        wrong = [
            name for name, number in self.model.numbers().items() if look.numbers[name] != number
        ]
        assert not wrong, (step, look.message, wrong)
        self.check_status(look)
        return look

    def check_status(self, look: Look) -> None:
        said, model = look.status, self.model
        is_consistent = said["consistent"]
        assert is_consistent == (not said["problems"])
        if model.has_failed or model.is_open or model.halves or not model.is_of_one_version:
            assert not is_consistent, (vars(model), said)
        if model.has_failed:
            assert said["last_refit"]["outcome"] == "failed", said

    def call(self, step: Step) -> Look:
        return self.step(step, self.model.call(step))

    @rule(
        number=numbers,
        form=forms,
        parts=st.integers(1, 3),
        first=st.integers(0, len(NAMES) - 1),
        in_session=st.booleans(),
    )
    def full(self, number: int, form: str, parts: int, first: int, in_session: bool) -> None:
        """A whole refit, in any buckets, order and form; whatever came before, all is well after it."""
        in_session = in_session and not self.model.is_open
        if in_session:
            self.begin()
        self.model.halves.clear()  # a refit that is whole brings both halves of everything
        order = NAMES[first:] + NAMES[:first]
        size = -(-len(order) // parts)
        for at in range(0, len(order), size):
            is_last = at + size >= len(order)
            if is_last:
                self.model.whole()
            step = Step("call", order[at : at + size], number, form, flush=is_last)
            look = self.call(step)
        if in_session:
            look = self.step(Step("end"), self.model.end())
        if not self.model.is_open:
            assert look.status["consistent"], look.status["problems"]
            assert look.status["last_refit"]["outcome"] == "ok"
            assert look.status["last_refit"]["complete"]

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
        form = "flat" if is_flat else "list"
        if fault == "half":
            form = "pairs"
            if names[at] not in FP8_NAMES:
                names = (*names[:at], *names[at + 1 :], FP8_NAMES[at])
                names, at = tuple(dict.fromkeys(names)), len(dict.fromkeys(names)) - 1
                at = names.index(names[at])
        if fault == "layout":
            form = "flat"
        self.call(Step("call", names, number, form, flush, fault, at))

    @rule()
    def begin(self) -> None:
        """Also inside a session that is open: refused, and the open one goes on."""
        self.step(Step("begin"), self.model.begin())

    @rule()
    def end(self) -> None:
        """Also of a session that nobody opened: refused."""
        self.step(Step("end"), self.model.end())

    @precondition(lambda self: not self.model.is_open)
    @rule(number=numbers)
    def disk(self, number: int) -> None:
        path = self.directory / f"version-{number}"
        if not path.exists():
            save_checkpoint(path, MODEL.config, version(number))
        self.step(Step("disk", version=number, path=str(path)), self.model.disk(number))

    def teardown(self) -> None:
        """The engine takes a whole refit and is what it was when it was loaded, byte for byte."""
        if not hasattr(self, "model"):
            return
        if self.model.is_open:
            self.engine.call(perform, Step("end"))
        self.engine.restore()


def machine_on(engine: Engine, directory: Path) -> type[RefitMachine]:
    """The machine for one engine; counts its steps anew."""
    return type(
        "RefitMachine", (RefitMachine,), {"engine": engine, "directory": directory, "steps": 0}
    )
