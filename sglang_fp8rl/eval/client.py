"""Asking a server for completions: OpenAI's chat protocol, or SGLang's own `/generate`.

A request that fails for a passing reason is repeated; one that fails for good is an error, never an
empty response that would be graded as wrong.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal

from ..errors import ConfigError, Fp8RlError

if TYPE_CHECKING:
    import httpx

Api = Literal["chat", "generate"]

# What a server is known by. The same URL may serve another model, or the same in another precision,
# when a run is resumed; SGLang tells, other servers may not.
_IDENTITY = ("model_path", "weight_version", "quantization", "dtype", "kv_cache_dtype")


class ServerError(Fp8RlError):
    """A server that can't be reached, refuses a request, or answers something unexpected."""


@dataclass(frozen=True)
class Sampling:
    """How each response is sampled. What is not named here is left to the server's defaults."""

    temperature: float = 1.0
    top_p: float = 0.7
    max_tokens: int = 20480

    def __post_init__(self) -> None:
        checks = (
            ("--temperature", self.temperature, self.temperature >= 0, "at least 0"),
            ("--top-p", self.top_p, 0 < self.top_p <= 1, "above 0 and at most 1"),
            ("--max-tokens", self.max_tokens, self.max_tokens >= 1, "at least 1"),
        )
        for name, value, good, rule in checks:
            if not good:
                raise ConfigError(name, str(value), f"it is {rule}", "Choose another value.")


@dataclass(frozen=True)
class Completion:
    """One response; `reasoning` is what a reasoning parser on the server took out of `text`."""

    text: str
    reasoning: str
    finish_reason: str
    tokens: int | None


class CompletionClient:
    """One server. Use as an async context manager.

    Args:
        url: http(s)://host:port, with or without a trailing `/v1`.
        api: `chat` (needs a chat template in the served tokenizer) or `generate` (raw text).
        sampling: sent with every request.
        api_key: sent as a bearer token.
        timeout: seconds for one whole response.
        concurrency: requests in flight at once.
        retries: further attempts after a passing failure.
        backoff: seconds before the first of them, doubling after.
    """

    def __init__(
        self,
        url: str,
        api: Api,
        sampling: Sampling,
        *,
        api_key: str | None = None,
        timeout: float = 3600.0,
        concurrency: int = 64,
        retries: int = 3,
        backoff: float = 1.0,
    ) -> None:
        self.url = normalize_url(url)
        self.api, self.sampling = api, sampling
        self.retries, self.backoff = retries, backoff
        self._model: str | None = None
        library = _import_httpx()
        self._transport_error = library.TransportError
        self._http: httpx.AsyncClient = library.AsyncClient(
            base_url=self.url,
            headers={"Authorization": f"Bearer {api_key}"} if api_key else None,
            timeout=library.Timeout(timeout, connect=10.0, pool=None),
            limits=library.Limits(max_connections=concurrency),
        )

    async def __aenter__(self) -> CompletionClient:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self._http.aclose()

    async def identify(self) -> dict[str, Any]:
        """Ask who is there: the served model and, from SGLang, weight version and precision.

        Raises:
            ServerError: nobody answers, or it serves no model.
        """
        listing = await self._get("/v1/models")
        models = [m.get("id") for m in (listing or {}).get("data", []) if isinstance(m, dict)]
        if not models:
            raise ServerError(
                self.url,
                f"GET /v1/models gave {listing!r}",
                "the server lists the model that it serves",
                "Check that this is the URL of an SGLang or OpenAI-compatible server.",
            )
        self._model = str(models[0])
        told: dict[str, Any] = {}
        for path in ("/server_info", "/model_info"):
            told |= await self._get(path) or {}
        return {"model": self._model} | {name: told[name] for name in _IDENTITY if name in told}

    async def complete(self, prompt: str) -> Completion:
        """Sample one response.

        Raises:
            ServerError: the request is refused, or still fails after the retries.
        """
        if self.api == "chat":
            return _read_chat(
                self.url, await self._post("/v1/chat/completions", self._chat(prompt))
            )
        return _read_generate(self.url, await self._post("/generate", self._generate(prompt)))

    def _chat(self, prompt: str) -> dict[str, Any]:
        return {
            "model": self._model,
            "messages": [{"role": "user", "content": prompt}],
            "temperature": self.sampling.temperature,
            "top_p": self.sampling.top_p,
            "max_tokens": self.sampling.max_tokens,
        }

    def _generate(self, prompt: str) -> dict[str, Any]:
        return {
            "text": prompt,
            "sampling_params": {
                "temperature": self.sampling.temperature,
                "top_p": self.sampling.top_p,
                "max_new_tokens": self.sampling.max_tokens,
            },
        }

    async def _get(self, path: str) -> dict[str, Any] | None:
        """Return the JSON at `path`, None where the server has no such page or doesn't show it."""
        try:
            reply = await self._http.get(path, timeout=30.0)
        except self._transport_error as error:
            raise _unreachable(self.url, path, error) from error
        if reply.status_code == 404 or (reply.status_code in (401, 403) and path != "/v1/models"):
            return None
        if reply.is_error:
            raise _refused(self.url, path, reply, self.api)
        return _json_object(self.url, path, reply)

    async def _post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        for attempt in range(self.retries + 1):
            last = attempt == self.retries
            try:
                reply = await self._http.post(path, json=body)
            except self._transport_error as error:
                if last:
                    raise _unreachable(self.url, path, error) from error
            else:
                passing = reply.status_code == 429 or reply.status_code >= 500
                if reply.is_error and (last or not passing):
                    raise _refused(self.url, path, reply, self.api)
                if not reply.is_error:
                    return _json_object(self.url, path, reply)
            await asyncio.sleep(self.backoff * 2**attempt)
        raise AssertionError("the last attempt returns or raises")


def normalize_url(url: str) -> str:
    """Return `url` without a trailing slash or `/v1`; refuse what is no http(s) URL."""
    if not url.startswith(("http://", "https://")):
        raise ConfigError(
            "--url", url, "it starts with http:// or https://", "Example: http://127.0.0.1:30000"
        )
    return url.rstrip("/").removesuffix("/v1").rstrip("/")


def _read_chat(url: str, reply: dict[str, Any]) -> Completion:
    try:
        choice = reply["choices"][0]
        message = choice["message"]
        return _completed(
            url,
            text=message.get("content") or "",
            reasoning=message.get("reasoning_content") or "",
            finish_reason=choice["finish_reason"],
            tokens=(reply.get("usage") or {}).get("completion_tokens"),
        )
    except (KeyError, IndexError, TypeError, AttributeError) as error:
        raise _strange(url, "/v1/chat/completions", reply) from error


def _read_generate(url: str, reply: dict[str, Any]) -> Completion:
    try:
        meta = reply["meta_info"]
        return _completed(
            url,
            text=reply["text"],
            reasoning="",
            finish_reason=meta["finish_reason"]["type"],
            tokens=meta.get("completion_tokens"),
        )
    except (KeyError, TypeError, AttributeError) as error:
        raise _strange(url, "/generate", reply) from error


def _completed(
    url: str, *, text: str, reasoning: str, finish_reason: str, tokens: int | None
) -> Completion:
    if finish_reason == "abort":
        raise ServerError(
            url,
            "a response was aborted",
            "an aborted response is no sample",
            "Check the server (a weight update or a shutdown aborts requests), then run the same "
            "command again to resume.",
        )
    return Completion(text, reasoning, finish_reason, tokens)


def _json_object(url: str, path: str, reply: httpx.Response) -> dict[str, Any]:
    try:
        found = reply.json()
    except ValueError as error:
        raise _strange(url, path, reply.text[:200]) from error
    if not isinstance(found, dict):
        raise _strange(url, path, found)
    return found


def _unreachable(url: str, path: str, error: Exception) -> ServerError:
    return ServerError(
        url,
        f"{path}: {type(error).__name__}: {error}",
        "the server did not answer",
        "Check that it runs and that the URL is right; samples already taken are kept, the same "
        "command resumes.",
    )


def _refused(url: str, path: str, reply: httpx.Response, api: Api) -> ServerError:
    hint = "Without a chat template, use --endpoint generate. " if api == "chat" else ""
    return ServerError(
        url,
        f"{path}: HTTP {reply.status_code}: {reply.text[:500].strip()}",
        "the server refused the request",
        f"{hint}A prompt and --max-tokens must fit its context; the same command resumes.",
    )


def _strange(url: str, path: str, reply: object) -> ServerError:
    return ServerError(
        url,
        f"{path} gave {str(reply)[:200]}",
        "the reply follows the protocol of the endpoint",
        "Check the URL and --endpoint.",
    )


def _import_httpx() -> Any:
    try:
        import httpx
    except ImportError as error:
        raise ConfigError(
            "eval-aime",
            "no module `httpx`",
            "requests are sent with httpx",
            'Install "sglang-fp8rl[eval]".',
        ) from error
    return httpx
