"""The trainer's side of RL on a pretrained model: FP32 masters, BF16 forward and backward pass."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "accuracy"))

from small_dapo.model import Policy
from small_dapo.task import MAX_RESPONSE_TOKENS
from small_dapo.wide_products import widen_products

_LAYER = re.compile(r"\.layers\.(\d+)\.")


class RealPolicy(Policy):
    """`small_dapo`'s policy on a converted checkpoint.

    Args:
        folder: the checkpoint.
        pad: a token id for what lies behind a response; it is never seen.
        trained_layers: only so many last layers are trained; all of the model if None.
    """

    def __init__(self, folder: Path, pad: int, trained_layers: int | None = None) -> None:
        from transformers import AutoModelForCausalLM

        self._model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="sdpa"
        )
        self.config, self._pad = self._model.config, pad
        widen_products(self._model)
        self.masters = dict(self._model.named_parameters())
        if trained_layers is not None:
            first = self.config.num_hidden_layers - trained_layers
            for name, weight in self.masters.items():
                layer = _LAYER.search(name)
                weight.requires_grad_(layer is not None and int(layer.group(1)) >= first)

    def logprobs(
        self, prompts: Sequence[Sequence[int]], responses: Sequence[Sequence[int]]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As `Policy.logprobs`; logits are made from the shortest prompt's end on only."""
        rows = [[*prompt, *response] for prompt, response in zip(prompts, responses, strict=True)]
        first, width = min(map(len, prompts)) - 1, max(map(len, rows))
        ids = torch.full((len(rows), width), self._pad)
        where = torch.zeros(len(rows), MAX_RESPONSE_TOKENS, dtype=torch.long)
        mask = torch.zeros(len(rows), MAX_RESPONSE_TOKENS)
        for number, (row, prompt, response) in enumerate(
            zip(rows, prompts, responses, strict=True)
        ):
            ids[number, : len(row)] = torch.tensor(row)
            begin = len(prompt) - 1 - first
            where[number, : len(response)] = torch.arange(begin, begin + len(response))
            mask[number, : len(response)] = 1
        bf16 = {name: weight.bfloat16() for name, weight in self.masters.items()}
        kept = {"use_cache": False, "logits_to_keep": width - first}
        output = torch.func.functional_call(self._model, bf16, (ids,), kept)
        everywhere = output.logits[:, :-1].float().log_softmax(-1)  # [batch, width - first - 1, V]
        taken = everywhere.gather(-1, ids[:, first + 1 :, None])[..., 0]
        return taken.gather(1, where) * mask, mask
