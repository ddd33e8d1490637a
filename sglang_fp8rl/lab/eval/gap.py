"""The gap between a served model and a `transformers` model, on completions that it sampled."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from ...client import RefitClient
from ...trainer.served_weights import check_as_served, compute_as_served
from ..metrics import MismatchMetrics, mismatch_metrics
from .options import check_values
from .prompts import load_prompts
from .rescoring import Precision, load_model, load_tokenizer, rescore
from .rollouts import Rollout, sample_rollouts


@dataclass(frozen=True)
class MismatchReport:
    """The metrics and the tokens they rest on: `(tokens,)` FP32 of both engines, in one order."""

    metrics: MismatchMetrics
    rollout_logprobs: torch.Tensor
    trainer_logprobs: torch.Tensor
    settings: dict[str, Any]

    def as_dict(self) -> dict[str, Any]:
        """Settings and metrics, as plain values; NaN (an undefined correlation) becomes None."""
        values = asdict(self.metrics)
        return {
            "settings": self.settings,
            "metrics": {name: None if v != v else v for name, v in values.items()},
        }


def run_mismatch(
    url: str,
    model: str,
    *,
    prompts: Path | None = None,
    max_new_tokens: int = 64,
    temperature: float = 1.0,
    precision: Precision = "bfloat16",
    device: str = "cpu",
    as_served: bool = False,
) -> MismatchReport:
    """Sample completions from `url`, rescore them with `model`, and measure the gap.

    Args:
        model: checkpoint folder or model id, as the trainer holds it.
        as_served: the model computes with the weights as the server holds them, proven by bytes.
        prompts: see `prompts.load_prompts`.
        temperature: above 0; the estimates need tokens sampled from the rollout's distribution.

    Raises:
        Fp8RlError: bad options or prompts, a model that can't be loaded or isn't the served one,
            a server that fails, or is not of this package where `as_served` asks for its plan.
    """
    check_values(
        ("--max-new-tokens", max_new_tokens, max_new_tokens >= 1, "at least 1"),
        ("--temperature", temperature, temperature > 0, "above 0: greedy tokens are no samples"),
        ("--dtype", precision, precision in ("float32", "bfloat16"), "float32 or bfloat16"),
    )
    reference = load_model(model, precision, device)
    if as_served:
        client = RefitClient(url)
        compute_as_served(reference, client.plan())
        check_as_served(reference, client)
    vocabulary = reference.get_input_embeddings().num_embeddings
    ids = load_prompts(prompts, load_tokenizer(model), vocabulary)
    rollouts = sample_rollouts(url, ids, max_new_tokens=max_new_tokens, temperature=temperature)
    settings = {
        "url": url,
        "model": model,
        "dtype": precision,
        "as_served": as_served,
        "temperature": temperature,
        "max_new_tokens": max_new_tokens,
        "prompts": len(ids),
    }
    return compare_rollouts(rollouts, rescore(reference, rollouts, temperature), settings)


def compare_rollouts(
    rollouts: list[Rollout], trainer_logprobs: list[torch.Tensor], settings: dict[str, Any]
) -> MismatchReport:
    """Measure the gap between rollouts and their (tokens,) rescored log-probabilities."""
    pad = torch.nn.utils.rnn.pad_sequence
    ours = [torch.tensor(rollout.logprobs, dtype=torch.float32) for rollout in rollouts]
    rollout = pad(ours, batch_first=True)  # (prompts, longest)
    trainer = pad(trainer_logprobs, batch_first=True)
    mask = pad([torch.ones_like(row, dtype=torch.bool) for row in ours], batch_first=True)
    metrics = mismatch_metrics(rollout, trainer, mask)
    return MismatchReport(metrics, rollout[mask], trainer[mask], settings)
