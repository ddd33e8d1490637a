"""Refits one after the other, in all the forms that trainers use, with faults between them."""

from __future__ import annotations

import random
import traceback
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from support.faults.fault import Fault
from support.faults.table import FAULTS
from support.faults.trainer import Answer, ServerTrainer

from sglang_fp8rl.client import RefitClient
from sglang_fp8rl.trainer import quantize_for_refit

Tensors = dict[str, Any]
UNFLUSHED = "then call /flush_cache."  # SGLang's last words; behind them this package says what else is wrong
FLUSH_SECONDS = (
    0.2  # the clients never stop, so a server that waits for an idle moment waits for ever
)


class BusyServersTrainer(ServerTrainer):
    """Under load SGLang stores the weights and refuses the flush behind them: for a fault that is a success.

    Attributes:
        last: what it was told last.
        unflushed: how often that was so.
        wants_refusal: whether the fault is about that refusal.
    """

    last: Answer | None = None
    unflushed = 0
    wants_refusal = False

    def http(self, method: str, path: str, **options: Any) -> Answer:
        answer = self.last = super().http(method, path, **options)
        is_unflushed = answer.code == 400 and answer.text.endswith(UNFLUSHED)
        if self.wants_refusal or not is_unflushed:
            return answer
        self.unflushed += 1
        return Answer(200, answer.text)


@dataclass
class Counts:
    """Of the soak.

    Attributes:
        unflushed: requests behind which SGLang kept its cache, because requests were running.
        faults: how often each was made.
        wrong: what was not as it has to be.
    """

    refits: int = 0
    proven: int = 0
    unflushed: int = 0
    seconds: list[float] = field(default_factory=list)
    faults: dict[str, int] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)


class Refits:
    """Sends one of two sets of weights after the other.

    Args:
        weights: the first set is the one that is served.
        directory: for faults that write checkpoints.
        has_sessions: whether this SGLang knows them.
    """

    def __init__(
        self,
        url: str,
        weights: tuple[Tensors, Tensors],
        directory: Path,
        has_sessions: bool,
        seed: int,
    ) -> None:
        self.counts = Counts()
        self._client, self._weights, self._directory = RefitClient(url), weights, directory
        self._plan = self._client.plan()
        self._draw = random.Random(seed)
        self._served = 0
        self._faults = [fault for fault in FAULTS if has_sessions or not fault.needs_sessions]

    def refit(self, verify: bool) -> None:
        """One whole refit, in a form that is drawn."""
        self._served = 1 - self._served
        tensors: Any = self._weights[self._served].items()
        form = self._draw.choice(("fp32", "quantized", "bf16"))
        if form == "quantized":
            tensors = quantize_for_refit(tensors, self._plan)
        elif form == "bf16":
            tensors = ((name, tensor.bfloat16()) for name, tensor in tensors)
        done = self._client.update(
            tensors,
            bucket_bytes=self._draw.choice((1 << 20, 1 << 22, 1 << 26)),
            plan=self._plan,
            verify=verify,
            flush_timeout=FLUSH_SECONDS,
        )
        self.counts.refits += 1
        self.counts.proven += verify
        self.counts.unflushed += not done.cache_flushed
        self.counts.seconds.append(done.seconds)
        status = self._client.status()
        if not status["consistent"]:
            self.counts.wrong.append(f"refit {self.counts.refits}: {status['problems'][:2]}")

    def fault(self) -> None:
        """One fault of the table, and whatever a client has to do before the next refit."""
        fault: Fault = self._draw.choice(self._faults)
        number = sum(self.counts.faults.values())
        directory = self._directory / f"fault-{number}"
        directory.mkdir()
        old, new = self._weights[self._served], self._weights[1 - self._served]
        trainer = BusyServersTrainer(self._client.url, old, new, directory)
        trainer.wants_refusal = "flush" in fault.told
        try:
            answer = fault.act(trainer)
        except AssertionError as error:  # its own; the soak goes on, and says so at its end
            frames = "".join(traceback.format_tb(error.__traceback__)[-1:])
            self.counts.wrong.append(f"{fault.name}: {frames}the last answer was {trainer.last}")
        else:
            if answer.code != fault.code:
                self.counts.wrong.append(f"{fault.name}: {answer}")
        self.counts.unflushed += trainer.unflushed
        self.counts.faults[fault.name] = self.counts.faults.get(fault.name, 0) + 1
        if any("session is open" in problem for problem in self._client.status()["problems"]):
            self._client.close_session()
