"""A real SGLang server of an arm: it samples answers, and it says how likely given tokens are."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from rollout_server import RolloutServer

from sglang_fp8rl.errors import HostError
from sglang_fp8rl.lab.eval.server import Rollout

from .arms import Arm

BATCH = 64  # requests at once
_BENCHMARKS = Path(__file__).parents[2]
Advance = Callable[[int], object]  # told the number of tokens that are done


def _ignore(tokens: int) -> None:
    """For who shows no progress."""


class ArmServer(RolloutServer):
    """`RolloutServer` with this folder's launcher.

    Args:
        model: the converted checkpoint.
        remember: keep prompts in the radix cache; else every token is computed each time.
        batch: requests at once.
    """

    def __init__(
        self,
        arm: Arm,
        model: Path,
        threads: int,
        seed: int,
        log_path: Path,
        *,
        remember: bool = False,
        batch: int = BATCH,
    ) -> None:
        self._batch = batch
        path = os.pathsep.join([str(_BENCHMARKS), *filter(None, [os.environ.get("PYTHONPATH")])])
        super().__init__(
            model,
            ["--dtype=bfloat16", *([] if remember else ["--disable-radix-cache"]), *arm.args],
            quantized=arm.quantized,
            options=arm.options,
            batch=batch,
            prefill=2048,
            seed=seed,
            threads=threads,
            log_path=log_path,
            env={"PYTHONPATH": path, **arm.env},
        )
        self.command[self.command.index("sglang_fp8rl.lab.testing.launch")] = (
            "studies.real_model.launch"
        )

    def sample(
        self,
        prompts: Sequence[list[int]],
        tokens: int,
        stop: list[int],
        advance: Advance = _ignore,
        *,
        temperature: float = 1.0,
    ) -> list[Rollout]:
        """As `answers`, so many prompts at once as the server takes."""
        found: list[Rollout] = []
        for start in range(0, len(prompts), self._batch):
            batch = prompts[start : start + self._batch]
            for answer in self.answers(batch, tokens, stop, temperature):
                found.append(answer)
                advance(len(answer.output_ids))
        return found

    def score(
        self, sequences: Sequence[tuple[list[int], list[int]]], advance: Advance
    ) -> list[torch.Tensor]:
        """FP32 log-probabilities of each continuation behind its prefix, by prefill.

        Args:
            sequences: (prefix, continuation) token ids; a prefix has at least one.
        """
        scored: list[torch.Tensor] = []
        for start in range(0, len(sequences), self._batch):
            batch = sequences[start : start + self._batch]
            found = self.meta_infos(
                [prefix + rest for prefix, rest in batch],
                {"temperature": 1.0, "max_new_tokens": 1},
                logprob_start_len=[max(len(prefix) - 1, 0) for prefix, _ in batch],
            )
            for (_, rest), meta in zip(batch, found, strict=True):
                scored.append(last_logprobs(meta["input_token_logprobs"], rest))
                advance(len(rest))
        return scored


def last_logprobs(pairs: Sequence[Sequence[Any]], tokens: list[int]) -> torch.Tensor:
    """The log-probabilities of the last tokens that a server reported, checked to be `tokens`."""
    tail = pairs[-len(tokens) :]
    if [pair[1] for pair in tail] != tokens or any(pair[0] is None for pair in tail):
        raise HostError(
            "input_token_logprobs",
            f"{len(pairs)} entries, the last are {[pair[1] for pair in tail][:4]}…",
            f"they end with the {len(tokens)} tokens that were sent",
            "Check logprob_start_len against this SGLang.",
        )
    return torch.tensor([pair[0] for pair in tail], dtype=torch.float32)
