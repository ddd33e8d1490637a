"""Completions with the log-probability of each sampled token, from SGLang's `/generate`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import requests

from .server import ServerError, normalize_url, read_json

_BATCH = 32  # prompts per request
_CONNECT_S, _ANSWER_S = 10.0, 600.0
_RULE = "each reply holds `meta_info.output_token_logprobs`"


@dataclass(frozen=True)
class Rollout:
    """One completion: `logprobs[i]` is the engine's own of `output_ids[i]`."""

    prompt_ids: list[int]
    output_ids: list[int]
    logprobs: list[float]


def sample_rollouts(
    url: str,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    temperature: float = 1.0,
) -> list[Rollout]:
    """Sample one completion of each prompt (token ids) over the whole vocabulary.

    The engine reports log-probabilities of the tempered distribution (unless it runs with
    `SGLANG_RETURN_ORIGINAL_LOGPROB`), before nucleus and top-k, which are switched off here.

    Raises:
        ServerError: the server is unreachable, refuses, aborts, or gives no log-probabilities.
    """
    url = normalize_url(url)
    rollouts: list[Rollout] = []
    with requests.Session() as session:
        for start in range(0, len(prompts), _BATCH):
            batch = [list(ids) for ids in prompts[start : start + _BATCH]]
            body = {
                "input_ids": batch,
                "sampling_params": {
                    "temperature": temperature,
                    "max_new_tokens": max_new_tokens,
                    "top_p": 1.0,
                    "top_k": -1,
                    "min_p": 0.0,
                },
                "return_logprob": True,
            }
            replies = _post(session, url, body)
            if len(replies) != len(batch):
                raise _strange(url, f"{len(replies)} completions of {len(batch)} prompts")
            pairs = zip(batch, replies, strict=True)
            rollouts += [_read_rollout(url, ids, reply) for ids, reply in pairs]
    return rollouts


def _post(session: requests.Session, url: str, body: dict) -> list[Any]:
    found = read_json(
        url,
        "/generate",
        lambda: session.post(f"{url}/generate", json=body, timeout=(_CONNECT_S, _ANSWER_S)),
        rule=_RULE,
        remedy="It must be an SGLang server of --model, and prompts must fit its context.",
    )
    return found if isinstance(found, list) else [found]


def _read_rollout(url: str, prompt_ids: list[int], reply: Any) -> Rollout:
    try:
        meta = reply["meta_info"]
        reason = meta["finish_reason"]["type"]
        entries = [
            (float(logprob), int(token)) for logprob, token, *_ in meta["output_token_logprobs"]
        ]
    except (KeyError, TypeError, ValueError) as error:
        raise _strange(url, str(reply)[:200]) from error
    if reason == "abort":
        raise ServerError(
            url,
            "a completion was aborted",
            "an aborted completion is no sample",
            "Check the server, then run the command again.",
        )
    return Rollout(prompt_ids, [token for _, token in entries], [value for value, _ in entries])


def _strange(url: str, found: str) -> ServerError:
    return ServerError(
        url, f"/generate gave {found}", _RULE, "Check that this is the URL of an SGLang server."
    )
