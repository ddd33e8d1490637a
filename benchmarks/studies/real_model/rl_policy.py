"""The trainer's side of RL on a pretrained model: only its last layers are trained.

No step changes the layers in front of them, so what those give is computed once for each sequence.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from small_dapo.model import Policy

_KEPT_BYTES = 2 << 30


class TailPolicy(Policy):
    """`Policy` of a checkpoint whose last layers alone are trained.

    Args:
        model, pad: see `Policy`.
        last_layers: so many.
    """

    def __init__(self, model: Any, pad: int, last_layers: int) -> None:
        super().__init__(model, pad)
        self._body = model.model
        self._front, self._tail = self._body.layers[:-last_layers], self._body.layers[-last_layers:]
        model.requires_grad_(False)
        self._tail.requires_grad_(True)
        self._frozen = {n: w.bfloat16() for n, w in self.masters.items() if not w.requires_grad}
        # By token ids: `[tokens, hidden]` in BF16, what comes out of the frozen layers.
        self._seen: dict[tuple[int, ...], torch.Tensor] = {}
        self._bytes = 0

    def _logits(self, rows: Sequence[Sequence[int]], ids: torch.Tensor, kept: int) -> torch.Tensor:
        trained = {n: w.bfloat16() for n, w in self.masters.items() if w.requires_grad}
        options = {
            "inputs_embeds": self._hidden(rows, ids.shape[1]),
            "use_cache": False,
            "logits_to_keep": kept,
        }
        with _handing_on(self._front):
            return torch.func.functional_call(
                self._model, {**self._frozen, **trained}, (), options
            ).logits

    def _hidden(self, rows: Sequence[Sequence[int]], width: int) -> torch.Tensor:
        """`[rows, width, hidden]` BF16; zeros behind a row's end, which nothing in front of it sees."""
        if self._bytes > _KEPT_BYTES:
            self._seen.clear()
            self._bytes = 0
        keys = [tuple(row) for row in rows]
        self._see([key for key in dict.fromkeys(keys) if key not in self._seen])
        hidden = torch.zeros(len(rows), width, self.config.hidden_size, dtype=torch.bfloat16)
        for number, key in enumerate(keys):
            hidden[number, : len(key)] = self._seen[key]
        return hidden

    @torch.no_grad()
    def _see(self, keys: Sequence[tuple[int, ...]]) -> None:
        if not keys:
            return
        ids = torch.zeros(len(keys), max(map(len, keys)), dtype=torch.long)
        for number, key in enumerate(keys):
            ids[number, : len(key)] = torch.tensor(key)
        weights = {name.removeprefix("model."): weight for name, weight in self._frozen.items()}
        with _handing_on([*self._tail, self._body.norm]):
            output = torch.func.functional_call(self._body, weights, (ids,), {"use_cache": False})
        for number, key in enumerate(keys):
            self._seen[key] = output.last_hidden_state[number, : len(key)].clone()
            self._bytes += self._seen[key].nbytes


def trained_policy(folder: Path, pad: int, last_layers: int | None) -> Policy:
    """A checkpoint's policy; only so many last layers go on to be trained, all of it if None."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="sdpa"
    )
    return Policy(model, pad) if last_layers is None else TailPolicy(model, pad, last_layers)


@contextmanager
def _handing_on(modules: Iterable[torch.nn.Module]) -> Iterator[None]:
    """Within it these modules give what they get."""
    modules = list(modules)
    for module in modules:
        module.forward = _first
    try:
        yield
    finally:
        for module in modules:
            del module.forward


def _first(hidden: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    return hidden
