"""Requests to a server that is evaluated, and who answers there: model, weight version, precision."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import requests

from ...errors import ConfigError, EvaluationError

# What a server is known by. The same URL may serve another model, or the same in another precision,
# when a run is resumed; SGLang tells, other servers may not.
_IDENTITY = ("model_path", "weight_version", "quantization", "dtype", "kv_cache_dtype")
_CONNECT_S, _PAGE_S, _COMPLETION_S = 10.0, 30.0, 600.0


def normalize_url(url: str) -> str:
    """Return `url` without a trailing slash or `/v1`; refuse what is no http(s) URL."""
    if not url.startswith(("http://", "https://")):
        raise ConfigError(
            "--url", url, "it starts with http:// or https://", "Example: http://127.0.0.1:30000"
        )
    return url.rstrip("/").removesuffix("/v1").rstrip("/")


def identify(url: str, api_key: str | None = None) -> dict[str, Any]:
    """Ask who is there: `model`, the served name, and those of `_IDENTITY` that the server tells.

    Raises:
        EvaluationError: nobody answers, or it serves no model.
    """
    rule = "the server lists the model that it serves"
    listing = request_json(url, "/v1/models", rule=rule, api_key=api_key)
    try:
        model = str(listing["data"][0]["id"])
    except (KeyError, TypeError, IndexError) as error:
        raise unexpected(url, f"/v1/models gave {listing!r}", rule) from error
    told = {}
    for page in ("/server_info", "/model_info"):
        # Other servers than SGLang have no such page, or don't show it.
        found = request_json(url, page, rule=rule, api_key=api_key, absent=(401, 403, 404))
        told.update(found if isinstance(found, dict) else {})
    return {"model": model} | {name: told[name] for name in _IDENTITY if name in told}


def request_json(
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
    except requests.RequestException as error:
        raise EvaluationError(
            url,
            f"{path}: {type(error).__name__}: {error}",
            "the server did not answer",
            "Check that it runs and that the URL is right.",
        ) from error
    if reply.status_code in absent:
        return None
    if not reply.ok:
        raise unexpected(url, f"{path}: HTTP {reply.status_code}: {reply.text[:500].strip()}", rule)
    try:
        return reply.json()
    except ValueError as error:
        raise unexpected(url, f"{path} gave {reply.text[:200]!r}", rule) from error


def unexpected(url: str, found: str, rule: str) -> EvaluationError:
    """The error for an answer that breaks `rule`."""
    remedy = (
        "Check that URL, API key and model are right, and that prompts fit the model's context."
    )
    return EvaluationError(url, found, rule, remedy)
