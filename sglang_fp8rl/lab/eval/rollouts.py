"""Completions with the log-probability of each sampled token, from SGLang's `/generate`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from .server import normalize_url, request_json, unexpected

_BATCH = 32  # prompts per request
_RULE = "each reply holds `meta_info.output_token_logprobs`"


@dataclass(frozen=True)
class Rollout:
    """One completion: `logprobs[i]` is the engine's own of `output_ids[i]`."""

    prompt_ids: list[int]
    output_ids: list[int]
    logprobs: list[float]


def sample_rollouts(
    url: str, prompts: Sequence[Sequence[int]], *, max_new_tokens: int, temperature: float = 1.0
) -> list[Rollout]:
    """Sample one completion of each prompt (token ids) over the whole vocabulary.

    The engine reports log-probabilities of the tempered distribution (unless it runs with
    `SGLANG_RETURN_ORIGINAL_LOGPROB`), before nucleus and top-k, which are switched off here.

    Raises:
        EvaluationError: the server is unreachable, refuses, aborts, or gives no log-probabilities.
    """
    url = normalize_url(url)
    sampling = {
        "temperature": temperature,
        "max_new_tokens": max_new_tokens,
        "top_p": 1.0,
        "top_k": -1,
        "min_p": 0.0,
    }
    rollouts: list[Rollout] = []
    for start in range(0, len(prompts), _BATCH):
        batch = [list(ids) for ids in prompts[start : start + _BATCH]]
        body = {"input_ids": batch, "sampling_params": sampling, "return_logprob": True}
        answer = request_json(url, "/generate", rule=_RULE, body=body)
        replies = answer if isinstance(answer, list) else [answer]
        if len(replies) != len(batch):
            found = f"/generate gave {len(replies)} completions of {len(batch)} prompts"
            raise unexpected(url, found, _RULE)
        rollouts += [_read(url, ids, reply) for ids, reply in zip(batch, replies, strict=True)]
    return rollouts


def _read(url: str, prompt_ids: list[int], reply: Any) -> Rollout:
    try:
        meta = reply["meta_info"]
        reason = meta["finish_reason"]["type"]
        entries = [
            (float(logprob), int(token)) for logprob, token, *_ in meta["output_token_logprobs"]
        ]
    except (KeyError, TypeError, ValueError) as error:
        raise unexpected(url, f"/generate gave {str(reply)[:200]}", _RULE) from error
    if reason == "abort":
        raise unexpected(url, "a completion was aborted", "an aborted completion is no sample")
    return Rollout(prompt_ids, [token for _, token in entries], [value for value, _ in entries])
