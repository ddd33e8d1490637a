"""One token of a started model, as SGLang's own benchmark of one batch makes it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

TOKENS = (101, 102, 103, 104, 105)


def outputs(runner: Any) -> list[torch.Tensor]:
    """Logits behind a prompt, and behind the token that follows; a pooled output of a model that has no tokens."""
    from sglang.benchmark import one_batch

    runner.req_to_token_pool.clear()
    runner.token_to_kv_pool_allocator.clear()
    torch.manual_seed(0)
    asked = _Asked(runner)
    requests = one_batch.prepare_synthetic_inputs_for_latency_test(1, len(TOKENS), [list(TOKENS)])
    tokens, first, batch = one_batch.extend(requests, asked)
    if not runner.is_generation:
        return [first]
    _, second = one_batch.decode(tokens, batch, asked)
    return [first.clone(), second.clone()]


class _Asked:
    """A `ModelRunner` whose pooled outputs look like logits, for that benchmark."""

    def __init__(self, runner: Any) -> None:
        self._runner = runner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)

    def forward(self, forward_batch: Any) -> Any:
        found = self._runner.forward(forward_batch)
        if self._runner.is_generation:
            return found
        pooled = found.logits_output.embeddings
        pooled = torch.stack(list(pooled)) if isinstance(pooled, list) else pooled
        return SimpleNamespace(logits_output=SimpleNamespace(next_token_logits=pooled))

    def sample(self, *args: Any) -> Any:
        return self._runner.sample(*args) if self._runner.is_generation else None


def why_no_proof(before: list[torch.Tensor], after: list[torch.Tensor]) -> str:
    """Why outputs of two different weight sets prove nothing; empty if they do."""
    if not all(bool(torch.isfinite(one.float()).all()) for one in (*before, *after)):
        return "its outputs on random weights are not finite"
    if all(torch.equal(*pair) for pair in zip(before, after, strict=True)):
        return "its outputs are the same with other weights"
    return ""
