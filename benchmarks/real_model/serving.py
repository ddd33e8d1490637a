"""A real SGLang server of an arm: it samples answers, and it says how likely given tokens are."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from sglang_fp8rl.config import QUANTIZATION_METHOD
from sglang_fp8rl.errors import HostError
from sglang_fp8rl.lab.eval.rollouts import Rollout
from sglang_fp8rl.lab.testing.server import ServerProcess

from .arms import Arm

BATCH = 64  # requests at once
_TIMEOUT_S = 1800.0
_BENCHMARKS = Path(__file__).parents[1]
Advance = Callable[[int], object]  # told the number of tokens that are done


def _ignore(tokens: int) -> None:
    """For who shows no progress."""


class ArmServer(ServerProcess):
    """`ServerProcess` with this folder's launcher.

    Args:
        model: the converted checkpoint.
        threads: of the server's matrix products.
        seed: of its sampling.
        log_path: takes its output.
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
        args = [
            f"--random-seed={seed}",
            f"--max-running-requests={batch}",
            "--max-total-tokens=32768",
            "--mem-fraction-static=0.5",
            "--chunked-prefill-size=2048",
            "--max-prefill-tokens=2048",
            "--dtype=bfloat16",
            "--log-level=warning",
            *arm.args,
        ]
        if not remember:
            args.append("--disable-radix-cache")
        if arm.quantized:
            args.append(f"--quantization={QUANTIZATION_METHOD}")
        if arm.options:
            override = {"quantization_config": dict(arm.options)}
            args.append(f"--json-model-override-args={json.dumps(override)}")
        path = os.pathsep.join([str(_BENCHMARKS), *filter(None, [os.environ.get("PYTHONPATH")])])
        super().__init__(
            model,
            args,
            log_path=log_path,
            env={
                "OMP_NUM_THREADS": str(threads),
                "MKL_NUM_THREADS": str(threads),
                "PYTHONPATH": path,
                **arm.env,
            },
        )
        self.command[self.command.index("sglang_fp8rl.lab.testing.launch")] = "real_model.launch"

    def sample(
        self,
        prompts: Sequence[list[int]],
        tokens: int,
        stop: list[int],
        advance: Advance = _ignore,
        *,
        temperature: float = 1.0,
    ) -> list[Rollout]:
        """One answer to each prompt, over the whole vocabulary; greedy at temperature 0."""
        answers: list[Rollout] = []
        for start in range(0, len(prompts), self._batch):
            batch = list(prompts[start : start + self._batch])
            found = self._generate(
                batch,
                {"temperature": temperature, "max_new_tokens": tokens, "stop_token_ids": stop},
            )
            for prompt, meta in zip(batch, found, strict=True):
                pairs = meta["output_token_logprobs"]
                answers.append(Rollout(prompt, [p[1] for p in pairs], [p[0] for p in pairs]))
                advance(len(pairs))
        return answers

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
            found = self._generate(
                [prefix + rest for prefix, rest in batch],
                {"temperature": 1.0, "max_new_tokens": 1},
                logprob_start_len=[max(len(prefix) - 1, 0) for prefix, _ in batch],
            )
            for (_, rest), meta in zip(batch, found, strict=True):
                scored.append(last_logprobs(meta["input_token_logprobs"], rest))
                advance(len(rest))
        return scored

    def _generate(
        self, ids: list[list[int]], sampling: dict[str, Any], **more: Any
    ) -> list[dict[str, Any]]:
        payload = {"input_ids": ids, "sampling_params": sampling, "return_logprob": True, **more}
        return [
            answer["meta_info"] for answer in self.post("/generate", payload, timeout=_TIMEOUT_S)
        ]


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
