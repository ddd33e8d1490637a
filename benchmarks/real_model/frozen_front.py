"""The layers in front of those that are trained: their output of a sequence is computed once."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

_KEPT_BYTES = 2 << 30


class FrozenFront:
    """Hidden states behind the first `count` layers, which no step changes.

    Args:
        body: `transformers`' decoder (`embed_tokens`, `layers`, `norm`).
        weights: of the embedding and these layers, by their names in `body`, in BF16.
    """

    def __init__(self, body: torch.nn.Module, count: int, weights: dict[str, torch.Tensor]) -> None:
        self._body, self._count, self._weights = body, count, weights
        self._seen: dict[tuple[int, ...], torch.Tensor] = {}
        self._bytes = 0

    def hidden(self, rows: Sequence[Sequence[int]], width: int) -> torch.Tensor:
        """`[rows, width, hidden]` BF16; zeros behind a row's end, which nothing in front of it sees."""
        if self._bytes > _KEPT_BYTES:
            self._seen.clear()
            self._bytes = 0
        keys = [tuple(row) for row in rows]
        self._compute([key for key in dict.fromkeys(keys) if key not in self._seen])
        size = self._seen[keys[0]].shape[1]
        found = torch.zeros(len(rows), width, size, dtype=torch.bfloat16)
        for number, key in enumerate(keys):
            found[number, : len(key)] = self._seen[key]
        return found

    def _compute(self, keys: Sequence[tuple[int, ...]]) -> None:
        if not keys:
            return
        ids = torch.zeros(len(keys), max(map(len, keys)), dtype=torch.long)
        for number, key in enumerate(keys):
            ids[number, : len(key)] = torch.tensor(key)
        layers: Any = self._body.layers
        with torch.no_grad(), only(self._body, layers[: self._count], torch.nn.Identity()):
            output = torch.func.functional_call(
                self._body, self._weights, (ids,), {"use_cache": False}
            )
        for number, key in enumerate(keys):
            self._seen[key] = output.last_hidden_state[number, : len(key)].clone()
            self._bytes += self._seen[key].nbytes


@contextmanager
def only(body: Any, layers: torch.nn.ModuleList, norm: torch.nn.Module) -> Iterator[None]:
    """Within it `body` has these layers and this norm, and a config that says so."""
    before = body.layers, body.norm, body.config
    body.layers, body.norm = layers, norm
    body.config = copy.copy(body.config)
    body.config.num_hidden_layers = len(layers)
    try:
        yield
    finally:
        body.layers, body.norm, body.config = before
