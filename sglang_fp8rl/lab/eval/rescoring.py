"""The same tokens' log-probabilities from a `transformers` model: the trainer's side of the gap.

`transformers` is imported on first use: every SGLang installation has it, and most trainers.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import torch

from ...errors import EvaluationError
from .rollouts import Rollout

Precision = Literal["float32", "bfloat16"]


def load_model(path: str, precision: Precision, device: str) -> Any:
    """Load a causal language model for inference.

    Raises:
        EvaluationError: no such model, or no such device.
    """
    from transformers import AutoModelForCausalLM

    try:
        model = AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, precision))
    except (OSError, ValueError) as error:  # what from_pretrained raises for a bad path or config
        raise EvaluationError(
            "--model",
            f"{path!r}: {error}",
            "it is a checkpoint folder or model id that transformers loads",
            "Pass the unquantized model that the server was started from.",
        ) from error
    try:
        return model.to(device).eval()
    except (RuntimeError, AssertionError) as error:  # torch's for an unknown or absent device
        raise EvaluationError(
            "--device", f"{device!r}: {error}", "torch can use the device", "Use cpu or cuda."
        ) from error


def load_tokenizer(path: str) -> Any | None:
    """Return the tokenizer that lies beside the model, None if there is none."""
    from transformers import AutoTokenizer

    folder = Path(path)
    names = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model")
    if folder.is_dir() and not any((folder / name).exists() for name in names):
        return None
    try:
        return AutoTokenizer.from_pretrained(path)
    except (OSError, ValueError) as error:
        raise EvaluationError(
            "--model",
            f"{path!r}: {error}",
            "its tokenizer can be loaded",
            "Give --prompts with `input_ids` to do without a tokenizer.",
        ) from error


@torch.inference_mode()
def rescore(
    model: Any, rollouts: Sequence[Rollout], temperature: float = 1.0
) -> list[torch.Tensor]:
    """Return each rollout's (tokens,) FP32 log-probabilities under `model`.

    One forward pass per rollout, without padding; the log-softmax runs in FP32 over
    `logits / temperature`, whatever the model's precision.

    Raises:
        EvaluationError: a token id is outside the model's vocabulary.
    """
    device = next(model.parameters()).device
    vocabulary = model.get_input_embeddings().num_embeddings
    scored = []
    for number, rollout in enumerate(rollouts):
        ids = rollout.prompt_ids + rollout.output_ids
        if max(ids) >= vocabulary:
            raise EvaluationError(
                f"completion {number}",
                f"token id {max(ids)}",
                f"the model's vocabulary has {vocabulary} entries",
                "Pass the --model that is served.",
            )
        logits = model(torch.tensor([ids], device=device)).logits[0]  # (length, vocabulary)
        # Position i predicts token i + 1.
        predicting = logits[len(rollout.prompt_ids) - 1 : -1].float() / temperature
        targets = torch.tensor(rollout.output_ids, device=device, dtype=torch.long)
        logprobs = predicting.log_softmax(-1).gather(-1, targets[:, None])[:, 0]
        scored.append(logprobs.cpu())
    return scored
