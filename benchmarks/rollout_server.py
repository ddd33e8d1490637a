"""A real SGLang server that samples rollouts: token ids in, token ids and log-probabilities out."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sglang_fp8rl.config import QUANTIZATION_METHOD
from sglang_fp8rl.lab.eval.server import Rollout
from sglang_fp8rl.lab.testing.server import ServerProcess

_TIMEOUT_S = 1800.0
_START_TIMEOUT_S = 1200.0  # on a machine that others keep busy


class RolloutServer(ServerProcess):
    """`ServerProcess` that says what a batch of prompts is answered with.

    One HTTP request holds a whole batch. SGLang hands such a batch to its scheduler as one message, so
    what is computed together, and so every random draw, depends on the requests and the server's seed
    only: the same weights give the same rollouts, token for token and bit for bit.

    Args:
        args: more flags of the server.
        quantized: whether it runs with this package's quantization method, and `options` of that.
        batch: requests at once.
        prefill: tokens at once.
        seed: of its sampling.
        threads: of its matrix products.
        env: more variables of its environment.
    """

    def __init__(
        self,
        model: Path,
        args: Sequence[str],
        *,
        quantized: bool,
        options: Mapping[str, Any],
        batch: int,
        prefill: int,
        seed: int,
        threads: int,
        log_path: Path,
        env: Mapping[str, str] | None = None,
    ) -> None:
        flags = [
            f"--random-seed={seed}",
            f"--max-running-requests={batch}",
            "--max-total-tokens=32768",
            "--mem-fraction-static=0.5",  # or SGLang derives a negative one from the next two
            f"--chunked-prefill-size={prefill}",
            f"--max-prefill-tokens={prefill}",
            "--log-level=warning",
        ]
        if quantized:
            flags.append(f"--quantization={QUANTIZATION_METHOD}")
        if options:
            override = json.dumps({"quantization_config": dict(options)})
            flags.append(f"--json-model-override-args={override}")
        own = {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
        super().__init__(
            model,
            [*flags, *args],
            log_path=log_path,
            env={**own, **(env or {})},
            timeout=_START_TIMEOUT_S,
        )

    def answers(
        self, prompts: Sequence[list[int]], tokens: int, stop: list[int], temperature: float
    ) -> list[Rollout]:
        """One answer to each prompt, over the whole vocabulary; greedy at temperature 0."""
        sampling = {"temperature": temperature, "max_new_tokens": tokens, "stop_token_ids": stop}
        found = []
        for prompt, meta in zip(prompts, self.meta_infos(prompts, sampling), strict=True):
            pairs = meta["output_token_logprobs"]
            found.append(Rollout(prompt, [p[1] for p in pairs], [p[0] for p in pairs]))
        return found

    def meta_infos(
        self, ids: Sequence[list[int]], sampling: dict[str, Any], **more: Any
    ) -> list[dict[str, Any]]:
        """What SGLang says beside each answer of a batch, log-probabilities among it."""
        body = {"input_ids": ids, "sampling_params": sampling, "return_logprob": True, **more}
        return [one["meta_info"] for one in self.post("/generate", body, timeout=_TIMEOUT_S)]
