"""The gap between a served model and a `transformers` model, on completions that it sampled.

`transformers` is imported on first use: every SGLang installation has it, and most trainers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from ...client import RefitClient
from ...errors import ConfigError, EvaluationError
from ...trainer.served_weights import check_as_served, compute_as_served
from ..metrics import MismatchMetrics, mismatch_metrics
from .options import check_values
from .prompts import check_ids, load_prompts
from .server import Rollout, identify, normalize_url, sample_rollouts

Precision = Literal["float32", "bfloat16"]
NO_DEVICE = (RuntimeError, AssertionError, ValueError)  # torch's for an unknown or absent one


@dataclass(frozen=True)
class MismatchReport:
    """The metrics and the tokens they rest on: `(tokens,)` FP32 of both engines, in one order."""

    metrics: MismatchMetrics
    rollout_logprobs: torch.Tensor
    trainer_logprobs: torch.Tensor
    settings: dict[str, Any]

    def as_dict(self) -> dict[str, Any]:
        return {"settings": self.settings, "metrics": self.metrics.as_dict()}


def run_mismatch(
    url: str,
    model: str,
    *,
    prompts: Path | None = None,
    max_new_tokens: int = 64,
    temperature: float = 1.0,
    dtype: Precision = "bfloat16",
    device: str = "cpu",
    as_served: bool = False,
    api_key: str | None = None,
    admin_api_key: str | None = None,
) -> MismatchReport:
    """Sample completions from `url`, rescore them with `model`, and measure the gap.

    Args:
        model: checkpoint folder or model id, as the trainer holds it.
        as_served: the model computes with the weights as the server holds them, proven by bytes.

    Raises:
        Fp8RlError: bad options or prompts, a model that can't be loaded or isn't the served one,
            a server that fails, or is not of this package where `as_served` asks for its plan.
    """
    check_values(
        ("--max-new-tokens", max_new_tokens, max_new_tokens >= 1, "at least 1"),
        ("--temperature", temperature, temperature > 0, "above 0: greedy tokens are no samples"),
        ("--dtype", dtype, dtype in ("float32", "bfloat16"), "float32 or bfloat16"),
    )
    identify(normalize_url(url), api_key)  # before a model is loaded for nothing
    reference = load_model(model, dtype, device)
    if as_served:
        client = RefitClient(url, api_key=api_key, admin_api_key=admin_api_key)
        compute_as_served(reference, client.plan())
        check_as_served(reference, client)
    vocabulary = reference.get_input_embeddings().num_embeddings
    ids = load_prompts(prompts, load_tokenizer(model), vocabulary)
    rollouts = sample_rollouts(
        url, ids, max_new_tokens=max_new_tokens, temperature=temperature, api_key=api_key
    )
    settings = {
        "url": url,
        "model": model,
        "dtype": dtype,
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


def load_model(path: str, precision: Precision, device: str) -> Any:
    """A causal language model for inference. Raises `EvaluationError` for the path, `ConfigError` for the device."""
    from transformers import AutoModelForCausalLM

    try:
        model, loaded = AutoModelForCausalLM.from_pretrained(
            path, dtype=getattr(torch, precision), output_loading_info=True
        )
        if loaded["missing_keys"]:  # transformers fills them with chance
            raise ValueError(f"no weights for {sorted(loaded['missing_keys'])[:3]}")
    except Exception as error:  # a bad path, config or shape, a package that it wants: of any kind
        raise EvaluationError(
            "--model",
            f"{path!r}: {error}",
            "it has to be a checkpoint folder or model id that transformers loads whole",
            "Pass the unquantized model that the server was started from.",
        ) from error
    try:
        return model.to(device).eval()
    except NO_DEVICE as error:
        raise no_device(device, error) from error


def no_device(device: str, error: Exception) -> ConfigError:
    """What `--device` names, and torch can't use."""
    rule, remedy = "torch has to find the device", "Use cpu or cuda."
    return ConfigError("--device", f"{device!r}: {error}", rule, remedy)


def load_tokenizer(path: str) -> Any | None:
    """The tokenizer that lies beside the model, None if there is none."""
    from transformers import AutoTokenizer

    folder = Path(path)
    names = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model")
    if folder.is_dir() and not any((folder / name).exists() for name in names):
        return None
    try:
        return AutoTokenizer.from_pretrained(path)
    except Exception as error:  # of a file that is none of a tokenizer's: of any kind
        raise EvaluationError(
            "--model",
            f"{path!r}: {type(error).__name__}: {error}",
            "its tokenizer has to load",
            "Give --prompts with `input_ids` to do without a tokenizer.",
        ) from error


@torch.inference_mode()
def rescore(
    model: Any, rollouts: Sequence[Rollout], temperature: float = 1.0
) -> list[torch.Tensor]:
    """Each rollout's (tokens,) FP32 log-probabilities under `model`.

    One forward pass per rollout, without padding; the log-softmax runs in FP32 over `logits / temperature`.

    Raises:
        EvaluationError: a token id is outside the model's vocabulary.
    """
    device = next(model.parameters()).device
    vocabulary = model.get_input_embeddings().num_embeddings
    scored = []
    for number, rollout in enumerate(rollouts):
        ids = rollout.prompt_ids + rollout.output_ids
        check_ids(f"completion {number}", ids, vocabulary)
        logits = model(torch.tensor([ids], device=device)).logits[0]  # (length, vocabulary)
        # Position i predicts token i + 1.
        predicting = logits[len(rollout.prompt_ids) - 1 : -1].float() / temperature
        targets = torch.tensor(rollout.output_ids, device=device, dtype=torch.long)
        logprobs = predicting.log_softmax(-1).gather(-1, targets[:, None])[:, 0]
        scored.append(logprobs.cpu())
    return scored
