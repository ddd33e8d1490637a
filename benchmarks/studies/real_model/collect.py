"""Collecting log-probabilities: every arm's server and both trainers score the very same tokens.

The answers are sampled once, by the BF16 server, and all arms score them by prefill: so arms differ by
what they do to the same tokens, and not by the luck of their own. The arms of `OWN_SAMPLES` also sample
answers of their own, token by token, to see whether that makes a difference.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.progress import Progress

from sglang_fp8rl.lab.eval.gap import Precision
from sglang_fp8rl.lab.eval.server import Rollout

from .arms import BASELINE, DEFAULT, Arm
from .kept import Kept, digest
from .serving import ArmServer
from .trainer_side import TrainerSide

OWN_SAMPLES = (DEFAULT,)
TRAINERS: tuple[Precision, ...] = ("bfloat16", "float32")
Sequences = list[tuple[list[int], list[int]]]


@dataclass(frozen=True)
class Sizes:
    """How much is measured.

    Attributes:
        answers, answer_tokens: sampled answers and their longest length.
        windows, window_tokens: of each text.
        seed: of the servers' sampling.
    """

    answers: int = 128
    answer_tokens: int = 96
    windows: int = 16
    window_tokens: int = 256
    seed: int = 1


@dataclass(frozen=True)
class Inputs:
    """What is scored: prompts to answer, the token that ends an answer, windows of text."""

    prompts: list[list[int]]
    stop: list[int]
    windows: list[list[int]]

    @property
    def text(self) -> Sequences:
        """Windows, as continuations of their first token."""
        return [(window[:1], window[1:]) for window in self.windows]


class Collector:
    """Takes what is missing of a run, and reads what is there.

    Args:
        model: the converted checkpoint.
        threads: of a server, and of the trainers.
        progress: shows what is being taken.
    """

    def __init__(
        self,
        model: Path,
        inputs: Inputs,
        sizes: Sizes,
        kept: Kept,
        threads: int,
        progress: Progress,
    ) -> None:
        self._model, self._inputs, self._sizes = model, inputs, sizes
        self._kept, self._threads, self._progress = kept, threads, progress

    def arm(self, arm: Arm) -> dict[str, Any]:
        """Log-probabilities of one arm: `answers`, `text`, and `own` samples or None.

        The baseline has to be first: it samples the answers.
        """
        name = f"arm-{arm.name}-{digest([arm.options, arm.args, arm.env])}"
        found = self._kept.read(name)
        if found is not None:
            return found
        began = time.monotonic()
        task = self._progress.add_task(f"{arm.name}: starting", total=self._tokens(arm))
        log = self._kept.folder / f"{arm.name}.log"
        with ArmServer(arm, self._model, self._threads, self._sizes.seed, log) as server:

            def advance(tokens: int) -> None:
                self._progress.advance(task, tokens)

            own = None
            if arm.name == BASELINE and self._kept.read("answers") is None:
                self._progress.update(task, description=f"{arm.name}: answering")
                self._kept.write("answers", self._sample(server, advance))
            if arm.name in OWN_SAMPLES:
                self._progress.update(task, description=f"{arm.name}: answering")
                own = self._sample(server, advance)
            self._progress.update(task, description=f"{arm.name}: scoring")
            found = {
                "answers": _plain(server.score(self.answers(), advance)),
                "text": _plain(server.score(self._inputs.text, advance)),
                "own": own,
                "start_seconds": server.start_seconds,
                "seconds": time.monotonic() - began,
            }
        self._progress.update(task, description=arm.name, completed=self._tokens(arm))
        self._kept.write(name, found)
        return found

    def trainer(self, precision: Precision, own: dict[str, Any]) -> dict[str, Any]:
        """A trainer's log-probabilities of `answers`, `text` and of the arms' `own` samples.

        Args:
            own: rollouts by arm, as `arm()` gives them.
        """
        wanted: dict[str, Sequences] = {"answers": self.answers(), "text": self._inputs.text}
        for name, rollouts in own.items():
            wanted[f"own-{name}"] = [(r["prompt_ids"], r["output_ids"]) for r in rollouts]
        side = TrainerSide(self._model, precision)
        result = {}
        for part, sequences in wanted.items():
            piece = f"trainer-{precision}-{part}"
            found = self._kept.read(piece)
            if found is None:
                total = sum(len(rest) for _, rest in sequences)
                task = self._progress.add_task(f"trainer {precision}: {part}", total=total)
                scored = side.score(sequences, functools.partial(self._progress.advance, task))
                found = _plain(scored)
                self._kept.write(piece, found)
            result[part] = found
        return result

    def answers(self) -> Sequences:
        """Prompt and answer of every sample of the BF16 server."""
        return [(r["prompt_ids"], r["output_ids"]) for r in self._kept.read("answers") or []]

    def sampled_logprobs(self) -> list[torch.Tensor]:
        """What the BF16 server said when it sampled the answers, token by token."""
        return tensors([r["logprobs"] for r in self._kept.read("answers") or []])

    def _sample(self, server: ArmServer, advance: Any) -> list[dict[str, Any]]:
        sampled: list[Rollout] = server.sample(
            self._inputs.prompts, self._sizes.answer_tokens, self._inputs.stop, advance
        )
        return [asdict(rollout) for rollout in sampled]

    def _tokens(self, arm: Arm) -> int:
        sizes = self._sizes
        rounds = 1 + (arm.name == BASELINE) + (arm.name in OWN_SAMPLES)
        text = sum(len(window) - 1 for window in self._inputs.windows)
        return sizes.answers * sizes.answer_tokens * rounds + text


def tensors(rows: Sequence[Sequence[float]]) -> list[torch.Tensor]:
    """Rows of log-probabilities as FP32 tensors."""
    return [torch.tensor(row, dtype=torch.float32) for row in rows]


def _plain(rows: Sequence[torch.Tensor]) -> list[list[float]]:
    return [row.tolist() for row in rows]
