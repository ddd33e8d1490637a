"""Who answers at a URL: the served model and, from SGLang, its weight version and precision."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import requests

from ...errors import ConfigError, Fp8RlError

# What a server is known by. The same URL may serve another model, or the same in another precision,
# when a run is resumed; SGLang tells, other servers may not.
_IDENTITY = ("model_path", "weight_version", "quantization", "dtype", "kv_cache_dtype")
_TIMEOUT_S = 30.0


class ServerError(Fp8RlError):
    """A server that can't be reached, refuses a request, or answers something unexpected."""


def normalize_url(url: str) -> str:
    """Return `url` without a trailing slash or `/v1`; refuse what is no http(s) URL."""
    if not url.startswith(("http://", "https://")):
        raise ConfigError(
            "--url", url, "it starts with http:// or https://", "Example: http://127.0.0.1:30000"
        )
    return url.rstrip("/").removesuffix("/v1").rstrip("/")


def identify(url: str, api_key: str | None = None) -> dict[str, Any]:
    """Ask who is there.

    Returns:
        `model`, the served name, and those of `_IDENTITY` that the server tells.

    Raises:
        ServerError: nobody answers, or it serves no model.
    """
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    listing = _get(url, "/v1/models", headers)
    models = [m.get("id") for m in listing.get("data") or [] if isinstance(m, dict)]
    if not models:
        raise ServerError(
            url,
            f"GET /v1/models gave {listing!r}",
            "the server lists the model that it serves",
            "Check that this is the URL of an SGLang or OpenAI-compatible server.",
        )
    told = _get(url, "/server_info", headers) | _get(url, "/model_info", headers)
    return {"model": str(models[0])} | {name: told[name] for name in _IDENTITY if name in told}


def _get(url: str, path: str, headers: dict[str, str]) -> dict[str, Any]:
    """The JSON object at `path`; empty where the server has no such page or doesn't show it."""
    found = read_json(
        url,
        path,
        lambda: requests.get(url + path, headers=headers, timeout=_TIMEOUT_S),
        rule="the server says what it serves, in JSON",
        remedy="Check the URL and the API key.",
        absent=() if path == "/v1/models" else (401, 403, 404),
    )
    return found if isinstance(found, dict) else {}


def read_json(
    url: str,
    path: str,
    send: Callable[[], requests.Response],
    *,
    rule: str,
    remedy: str,
    absent: Sequence[int] = (),
) -> Any:
    """What a request is answered, as JSON; nothing where its status is one of `absent`.

    Raises:
        ServerError: no answer, another status than 2xx, or no JSON.
    """
    try:
        reply = send()
    except requests.RequestException as error:
        raise ServerError(
            url,
            f"{path}: {type(error).__name__}: {error}",
            "the server did not answer",
            "Check that it runs and that the URL is right.",
        ) from error
    if reply.status_code in absent:
        return None
    if not reply.ok:
        raise ServerError(
            url, f"{path}: HTTP {reply.status_code}: {reply.text[:500].strip()}", rule, remedy
        )
    try:
        return reply.json()
    except ValueError as error:
        raise ServerError(url, f"{path} gave {reply.text[:200]!r}", rule, remedy) from error
