"""The trainer's model: FP32 masters, BF16 forward pass, as FSDP's mixed precision has it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from sglang_fp8rl.lab.testing.checkpoints import make_config

from .settings import Settings
from .task import BOS, EOS, MAX_PROMPT_TOKENS, MAX_RESPONSE_TOKENS, PAD, VOCAB_SIZE
from .wide_products import widen_products

SEQUENCE_TOKENS = MAX_PROMPT_TOKENS + MAX_RESPONSE_TOKENS
_HEAD_DIM = 64


def model_config(settings: Settings) -> Any:
    """The `transformers` config: Qwen3, every projection a multiple of the 128×128 block."""
    return make_config(
        "qwen3",
        hidden_size=settings.hidden_size,
        intermediate_size=settings.intermediate_size,
        num_hidden_layers=settings.layers,
        num_attention_heads=settings.hidden_size // _HEAD_DIM,
        num_key_value_heads=settings.hidden_size // _HEAD_DIM // 2,
        head_dim=_HEAD_DIM,
        vocab_size=VOCAB_SIZE,
        max_position_embeddings=256,
        bos_token_id=BOS,
        eos_token_id=EOS,
    )


class Policy:
    """FP32 master weights under checkpoint names, and log-probabilities of responses.

    Args:
        settings: the sizes.
        seed: of the initial weights.
    """

    def __init__(self, settings: Settings, seed: int) -> None:
        from transformers import AutoModelForCausalLM

        self.config = model_config(settings)
        torch.manual_seed(seed)
        self._model = AutoModelForCausalLM.from_config(
            self.config, dtype=torch.float32, attn_implementation="sdpa"
        )
        widen_products(self._model)
        self.masters: dict[str, torch.Tensor] = dict(self._model.named_parameters())

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Copies of the masters."""
        return {name: weight.detach().clone() for name, weight in self.masters.items()}

    def load(self, state: dict[str, torch.Tensor]) -> None:
        with torch.no_grad():
            for name, weight in self.masters.items():
                weight.copy_(state[name])

    def logprobs(
        self, prompts: Sequence[Sequence[int]], responses: Sequence[Sequence[int]]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probabilities of each response's tokens, differentiable in the masters.

        Padding is on the right, where causal attention keeps it from being seen.

        Returns:
            FP32 `[batch, MAX_RESPONSE_TOKENS]`, 0 at padding, and the FP32 mask of response tokens.
        """
        ids = torch.full((len(prompts), SEQUENCE_TOKENS), PAD)
        where = torch.zeros(len(prompts), MAX_RESPONSE_TOKENS, dtype=torch.long)
        mask = torch.zeros(len(prompts), MAX_RESPONSE_TOKENS)
        for row, (prompt, response) in enumerate(zip(prompts, responses, strict=True)):
            end = len(prompt) + len(response)
            ids[row, :end] = torch.tensor([*prompt, *response])
            where[row, : len(response)] = torch.arange(len(prompt) - 1, end - 1)
            mask[row, : len(response)] = 1
        bf16 = {name: weight.bfloat16() for name, weight in self.masters.items()}
        output = torch.func.functional_call(self._model, bf16, (ids,), {"use_cache": False})
        everywhere = output.logits[:, :-1].float().log_softmax(-1)
        taken = everywhere.gather(-1, ids[:, 1:, None])[..., 0]  # [batch, SEQUENCE_TOKENS - 1]
        return taken.gather(1, where) * mask, mask


def padded(rows: Sequence[Sequence[float]]) -> torch.Tensor:
    """`[batch, MAX_RESPONSE_TOKENS]` FP32, 0 at padding."""
    result = torch.zeros(len(rows), MAX_RESPONSE_TOKENS)
    for row, values in enumerate(rows):
        result[row, : len(values)] = torch.tensor(values, dtype=torch.float32)
    return result
