"""The trainer's side of RL on a pretrained model: FP32 masters, BF16 forward and backward pass."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from .frozen_front import FrozenFront, only

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
        trained_layers: only so many last layers are trained, and what is in front of them is
            computed once for each sequence; all of the model is trained if None.
    """

    def __init__(self, folder: Path, pad: int, trained_layers: int | None = None) -> None:
        from transformers import AutoModelForCausalLM

        self._model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="sdpa"
        )
        self.config, self._pad = self._model.config, pad
        widen_products(self._model)
        self.masters = dict(self._model.named_parameters())
        self._first = 0
        if trained_layers is not None:
            self._first = self.config.num_hidden_layers - trained_layers
            for name, weight in self.masters.items():
                weight.requires_grad_(_layer(name) >= self._first)
            in_front = {
                name.removeprefix("model."): weight.detach().bfloat16()
                for name, weight in self.masters.items()
                if "embed_tokens" in name or _layer(name) in range(self._first)
            }
            self._front = FrozenFront(self._model.model, self._first, in_front)

    def save(self, folder: Path) -> None:
        """Write the masters as a checkpoint in FP32, without a tokenizer."""
        self._model.save_pretrained(folder)

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
        kept = {"use_cache": False, "logits_to_keep": width - first}
        if self._first:
            output = self._tail(self._front.hidden(rows, width), kept)
        else:
            bf16 = {name: weight.bfloat16() for name, weight in self.masters.items()}
            output = torch.func.functional_call(self._model, bf16, (ids,), kept)
        everywhere = output.logits[:, :-1].float().log_softmax(-1)  # [batch, width - first - 1, V]
        taken = everywhere.gather(-1, ids[:, first + 1 :, None])[..., 0]
        return taken.gather(1, where) * mask, mask

    def _tail(self, hidden: torch.Tensor, kept: dict[str, Any]) -> Any:
        """The trained layers, the norm and the head."""
        body: Any = self._model.model
        weights = {
            _LAYER.sub(
                lambda layer: f".layers.{int(layer[1]) - self._first}.", name
            ): weight.bfloat16()
            for name, weight in self.masters.items()
            if _layer(name) not in range(self._first)
        }
        with only(body, body.layers[self._first :], body.norm):
            return torch.func.functional_call(
                self._model, weights, (), {"inputs_embeds": hidden, **kept}
            )


def _layer(name: str) -> int:
    """-1 for what is in no layer."""
    found = _LAYER.search(name)
    return -1 if found is None else int(found.group(1))
