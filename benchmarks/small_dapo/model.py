"""The trainer's model: FP32 masters, BF16 forward pass, as FSDP's mixed precision has it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from sglang_fp8rl.client import RefitClient
from sglang_fp8rl.lab.testing.checkpoints import make_config
from sglang_fp8rl.trainer.served_weights import check_as_served, compute_as_served
from sglang_fp8rl.wire.plan import RefitPlan

from .settings import Settings
from .task import BOS, EOS, MAX_PROMPT_TOKENS, MAX_RESPONSE_TOKENS, PAD, VOCAB_SIZE
from .wide_products import wide_products

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
        model: of `transformers`, in FP32.
        pad: a token id for what lies behind a response; it is never seen.
        width: tokens of every batch; as many as its longest sequence has if None.
    """

    def __init__(self, model: Any, pad: int, width: int | None = None) -> None:
        self._model, self._pad, self._width = model, pad, width
        # `logits_to_keep` cuts a view, which torch multiplies 30 times slower in BF16 on some CPUs.
        model.get_output_embeddings().register_forward_pre_hook(_contiguous)
        self.config = model.config
        self.masters: dict[str, torch.Tensor] = dict(model.named_parameters())

    @classmethod
    def random(cls, settings: Settings, seed: int) -> Policy:
        """Of these sizes, with random weights."""
        from transformers import AutoModelForCausalLM

        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(
            model_config(settings), dtype=torch.float32, attn_implementation="sdpa"
        )
        return cls(model, PAD, SEQUENCE_TOKENS)

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Copies of the masters."""
        return {name: weight.detach().clone() for name, weight in self.masters.items()}

    def load(self, state: dict[str, torch.Tensor]) -> None:
        with torch.no_grad():
            for name, weight in self.masters.items():
                weight.copy_(state[name])

    def compute_as_served(self, plan: RefitPlan) -> None:
        """Compute with the weights as the plan's server holds them, from the first pass on."""
        compute_as_served(self._model, plan)

    def prove(self, client: RefitClient) -> int:
        """The number of tensors that the server holds as this model computes with them: all, or it raises."""

        def run(model: Any) -> None:
            bf16 = {name: weight.bfloat16() for name, weight in self.masters.items()}
            torch.func.functional_call(model, bf16, (torch.arange(16)[None],))

        return check_as_served(self._model, client, run=run).compared

    def save(self, folder: Path) -> None:
        """Write the masters as a checkpoint in FP32, without a tokenizer."""
        self._model.save_pretrained(folder)

    def logprobs(
        self, prompts: Sequence[Sequence[int]], responses: Sequence[Sequence[int]]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probabilities of each response's tokens, differentiable in the masters.

        Padding is on the right, where causal attention keeps it from being seen. Logits are made from
        the shortest prompt's end on only.

        Returns:
            FP32 `[batch, MAX_RESPONSE_TOKENS]`, 0 at padding, and the FP32 mask of response tokens.
        """
        rows = [[*prompt, *response] for prompt, response in zip(prompts, responses, strict=True)]
        first, width = min(map(len, prompts)) - 1, self._width or max(map(len, rows))
        ids = torch.full((len(rows), width), self._pad)
        where = torch.zeros(len(rows), MAX_RESPONSE_TOKENS, dtype=torch.long)
        mask = torch.zeros(len(rows), MAX_RESPONSE_TOKENS)
        for number, (row, response) in enumerate(zip(rows, responses, strict=True)):
            ids[number, : len(row)] = torch.tensor(row)
            begin = len(row) - len(response) - 1 - first
            where[number, : len(response)] = torch.arange(begin, begin + len(response))
            mask[number, : len(response)] = 1
        with wide_products():
            logits = self._logits(rows, ids, width - first)
        everywhere = logits[:, :-1].float().log_softmax(-1)  # [batch, width - first - 1, V]
        taken = everywhere.gather(-1, ids[:, first + 1 :, None])[..., 0]
        return taken.gather(1, where) * mask, mask

    def _logits(self, rows: Sequence[Sequence[int]], ids: torch.Tensor, kept: int) -> torch.Tensor:
        """Of the last `kept` positions, BF16 `[batch, kept, V]`; `ids` are the rows, padded."""
        bf16 = {name: weight.bfloat16() for name, weight in self.masters.items()}
        options = {"use_cache": False, "logits_to_keep": kept}
        return torch.func.functional_call(self._model, bf16, (ids,), options).logits


def _contiguous(_: Any, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    return tuple(one.contiguous() for one in inputs)


def padded(rows: Sequence[Sequence[float]]) -> torch.Tensor:
    """`[batch, MAX_RESPONSE_TOKENS]` FP32, 0 at padding."""
    result = torch.zeros(len(rows), MAX_RESPONSE_TOKENS)
    for row, values in enumerate(rows):
        result[row, : len(values)] = torch.tensor(values, dtype=torch.float32)
    return result
