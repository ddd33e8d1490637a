"""What a running server is asked over HTTP: who it is, and completions with log-probabilities."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import requests

from ...errors import ConfigError, EvaluationError

# What a server is known by. The same URL may serve another model, or the same in another precision,
# when a run is resumed; SGLang tells, other servers may not.
_IDENTITY = ("model_path", "weight_version", "quantization", "dtype", "kv_cache_dtype")
_CONNECT_S, _PAGE_S, _COMPLETION_S = 10.0, 30.0, 600.0
_BATCH = 32  # prompts per request
_RULE = "each reply has to hold `meta_info.output_token_logprobs`"


@dataclass(frozen=True)
class Rollout:
    """One completion: `logprobs[i]` is the engine's own of `output_ids[i]`."""

    prompt_ids: list[int]
    output_ids: list[int]
    logprobs: list[float]


def normalize_url(url: str) -> str:
    """Return `url` without a trailing slash or `/v1`; refuse what is no http(s) URL."""
    if not url.startswith(("http://", "https://")):
        raise ConfigError(
            "--url",
            url,
            "it has to start with http:// or https://",
            "Example: http://127.0.0.1:30000",
        )
    return url.rstrip("/").removesuffix("/v1").rstrip("/")


def identify(url: str, api_key: str | None = None) -> dict[str, Any]:
    """Ask who is there: `model`, the served name, and those of `_IDENTITY` that the server tells.

    Raises:
        EvaluationError: nobody answers, or it serves no model.
    """
    rule = "the server has to list the model that it serves"
    listing = _request_json(url, "/v1/models", rule=rule, api_key=api_key)
    try:
        model = str(listing["data"][0]["id"])
    except (KeyError, TypeError, IndexError) as error:
        raise _unexpected(url, f"/v1/models gave {listing!r}", rule) from error
    told = {}
    for page in ("/server_info", "/model_info"):
        # Other servers than SGLang have no such page, or don't show it.
        found = _request_json(url, page, rule=rule, api_key=api_key, absent=(401, 403, 404))
        told.update(found if isinstance(found, dict) else {})
    return {"model": model} | {name: told[name] for name in _IDENTITY if name in told}


def _request_json(
    url: str,
    path: str,
    *,
    rule: str,
    body: dict[str, Any] | None = None,
    api_key: str | None = None,
    absent: Sequence[int] = (),
) -> Any:
    """GET, or POST of a body; the answer's JSON, or None where its status is one of `absent`.

    Raises:
        EvaluationError: no answer, another status than 2xx, or no JSON; `rule` says what was expected.
    """
    method, patience = ("GET", _PAGE_S) if body is None else ("POST", _COMPLETION_S)
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    try:
        reply = requests.request(
            method, url + path, json=body, headers=headers, timeout=(_CONNECT_S, patience)
        )
    except (requests.RequestException, UnicodeError) as error:  # of a key that no header holds
        raise EvaluationError(
            url,
            f"{path}: {type(error).__name__}: {error}",
            "the server did not answer",
            "Check that it runs and that the URL is right.",
        ) from error
    if reply.status_code in absent:
        return None
    if not reply.ok:
        raise _unexpected(
            url, f"{path}: HTTP {reply.status_code}: {reply.text[:500].strip()}", rule
        )
    try:
        return reply.json()
    except ValueError as error:
        raise _unexpected(url, f"{path} gave {reply.text[:200]!r}", rule) from error


def _unexpected(url: str, found: str, rule: str) -> EvaluationError:
    remedy = "Check URL, API key and model, and that prompts fit the model's context."
    return EvaluationError(url, found, rule, remedy)


def sample_rollouts(
    url: str,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    temperature: float = 1.0,
    api_key: str | None = None,
) -> list[Rollout]:
    """Sample one completion of each prompt (token ids) over the whole vocabulary.

    The engine reports log-probabilities of the tempered distribution (unless it runs with
    `SGLANG_RETURN_ORIGINAL_LOGPROB`), before nucleus and top-k, which are switched off here.

    Raises:
        EvaluationError: the server is unreachable, refuses, aborts, or gives no log-probabilities.
    """
    url = normalize_url(url)
    sampling = {"temperature": temperature, "max_new_tokens": max_new_tokens}
    sampling |= {"top_p": 1.0, "top_k": -1, "min_p": 0.0}
    rollouts: list[Rollout] = []
    for start in range(0, len(prompts), _BATCH):
        batch = [list(ids) for ids in prompts[start : start + _BATCH]]
        body = {"input_ids": batch, "sampling_params": sampling, "return_logprob": True}
        answer = _request_json(url, "/generate", rule=_RULE, body=body, api_key=api_key)
        replies = answer if isinstance(answer, list) else [answer]
        if len(replies) != len(batch):
            found = f"/generate gave {len(replies)} completions of {len(batch)} prompts"
            raise _unexpected(url, found, _RULE)
        rollouts += [_read(url, ids, reply) for ids, reply in zip(batch, replies, strict=True)]
    return rollouts


def _read(url: str, prompt_ids: list[int], reply: Any) -> Rollout:
    try:
        meta = reply["meta_info"]
        reason = meta["finish_reason"]["type"]
        tokens = [int(token) for _, token, *_ in meta["output_token_logprobs"]]
        logprobs = [float(logprob) for logprob, *_ in meta["output_token_logprobs"]]
    except (KeyError, TypeError, ValueError) as error:
        raise _unexpected(url, f"/generate gave {str(reply)[:200]}", _RULE) from error
    if reason == "abort":
        raise _unexpected(url, "a completion was aborted", "an aborted completion is no sample")
    return Rollout(prompt_ids, tokens, logprobs)
