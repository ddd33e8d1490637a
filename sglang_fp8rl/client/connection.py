"""Requests to one server: its address, its keys, each answer that is no success as an error; and one bucket on its way while the next one is made."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from http import HTTPStatus
from time import perf_counter
from typing import Any

import requests

from ..errors import NoAnswerError, RefitError
from ..wire.bucket import Payload

_NO_KEY = (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN)


class Connection:
    """Keeps one HTTP session open.

    Args:
        url, timeout, api_key, admin_api_key: as `RefitClient`.

    Attributes:
        seconds_waited: for the answers of `post` and `post_admin`, since the start.
    """

    def __init__(
        self, url: str, timeout: float, api_key: str | None, admin_api_key: str | None
    ) -> None:
        self.url, self.timeout = url.rstrip("/"), timeout
        self.seconds_waited = 0.0
        self._http = requests.Session()
        if api_key:
            self._http.headers["Authorization"] = f"Bearer {api_key}"
        key = admin_api_key or api_key
        self._admin = {"Authorization": f"Bearer {key}"} if key else {}

    def get(self, path: str, what: str, **headers: str) -> requests.Response:
        """The answer at a path that SGLang, or this package, serves.

        Raises:
            NoAnswerError: the server can't be reached, or took too long.
            RefitError: its answer is no success.
        """
        try:
            answer = self._http.get(self.url + path, headers=headers, timeout=self.timeout)
        except requests.RequestException as error:
            raise NoAnswerError(
                self.url,
                f"no answer: {error}",
                f"{what} comes from a running server",
                "Look whether it is up and the address is right.",
            ) from error
        if answer.ok:
            return answer
        _check_key(f"GET {path}", answer)
        raise RefitError(
            self.url + path,
            f"HTTP {answer.status_code}: {answer.text[:500]}",
            f"{what} is served by a server of fp8_blockwise_online",
            "Start it with --quantization fp8_blockwise_online and this version of sglang-fp8rl.",
        )

    def get_admin(self, path: str, what: str) -> requests.Response:
        """As `get`, from an endpoint that may change the server."""
        return self.get(path, what, **self._admin)

    def post(
        self, path: str, body: dict[str, Any], *, headers: dict[str, str] | None = None
    ) -> Any:
        """What the server answers, as JSON where it is JSON.

        Raises:
            NoAnswerError: as `get`.
            RefitError: a key is missing, or a refusal in the server's own words.
        """
        return _content(path, self._send(path, body, headers))

    def post_admin(self, path: str, body: dict[str, Any]) -> Any:
        """As `post`, to an endpoint that changes the server."""
        return self.post(path, body, headers=self._admin)

    def post_admin_if_known(self, path: str, body: dict[str, Any]) -> bool:
        """As `post_admin`; False if the server has no such endpoint."""
        answer = self._send(path, body, self._admin)
        if answer.status_code == HTTPStatus.UNAUTHORIZED and self._admin:
            # SGLang asks for the api key where it knows no such endpoint, before it says so.
            answer = self._send(path, body, None)
        if answer.status_code == HTTPStatus.NOT_FOUND:
            return False
        _content(path, answer)
        return True

    def flush_cache(self, timeout: float) -> bool:
        """Let the server drop what the old weights computed, once running requests are done.

        Args:
            timeout: seconds that the server waits for them.

        Returns:
            Whether it was done.

        Raises:
            NoAnswerError: as `get`.
        """
        answer = self._send(f"/flush_cache?timeout={timeout}", {}, self._admin, patience=timeout)
        return answer.ok

    def _send(
        self,
        path: str,
        body: dict[str, Any],
        headers: dict[str, str] | None,
        *,
        patience: float = 0,
    ) -> requests.Response:
        """Args: patience: seconds that the server may wait before it begins."""
        began = perf_counter()
        try:
            return self._http.post(
                self.url + path, json=body, headers=headers, timeout=self.timeout + patience
            )
        except requests.RequestException as error:
            raise NoAnswerError(
                self.url + path,
                f"no answer: {error}",
                "without one it is not known whether the server did what it was asked",
                "Look whether it is up. Unless last_refit in GET /fp8rl/status has this update's "
                "version and outcome ok, send the update again, whole.",
            ) from error
        finally:
            self.seconds_waited += perf_counter() - began


def _check_key(request: str, answer: requests.Response) -> None:
    if answer.status_code in _NO_KEY:
        raise RefitError(
            request,
            f"HTTP {answer.status_code}",
            "the server takes a key that was not given or is another",
            "RefitClient(api_key=…, admin_api_key=…): SGLang wants the admin key for updates and "
            "sessions where it has one, the api key otherwise.",
        )


def _content(path: str, answer: requests.Response) -> Any:
    _check_key(f"POST {path}", answer)
    is_json = "json" in answer.headers.get("content-type", "")
    content = answer.json() if is_json else answer.text
    is_refused = isinstance(content, dict) and content.get("success") is False
    if not answer.ok or is_refused:
        text = content.get("message", content) if isinstance(content, dict) else content
        raise RefitError(
            f"POST {path}",
            f"HTTP {answer.status_code}",
            f"the server answered: {text}",
            "`sglang-fp8rl doctor` and the server's log say more.",
        )
    return content


Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class UpdateResult:
    """What one `update` sent.

    Attributes:
        seconds: wall time, making the tensors included.
        server_seconds: of it, waiting for the server: requests of buckets and of the session.
        cache_flushed: whether the server let go of what the old weights had computed. False where
            requests kept it busy: the weights are stored, and `/flush_cache` is still to be called.
        unproven: names that `verify` could not compare, each with the reason; empty without it.
    """

    tensors: int
    nbytes: int
    buckets: int
    seconds: float
    server_seconds: float
    cache_flushed: bool = True
    unproven: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class _InFlight:
    """A request that was posted.

    Attributes:
        payload: whose memory the server reads until it answers.
    """

    answer: Future
    payload: Payload
    tensors: int
    nbytes: int


class PipelinedSender:
    """Posts bodies one at a time, from a thread of its own.

    Args:
        post: sends one body and waits for the answer.
        on_bucket: called after each answer with the tensors and bytes sent so far.

    Attributes:
        tensors, nbytes, buckets: that the server has answered for.
    """

    def __init__(self, post: Callable[[dict[str, Any]], Any], on_bucket: Progress | None) -> None:
        self._post, self._on_bucket = post, on_bucket
        self._in_flight: _InFlight | None = None
        self._poster = ThreadPoolExecutor(1)
        self.tensors = self.nbytes = self.buckets = 0

    def __enter__(self) -> PipelinedSender:
        return self

    def __exit__(self, *_: object) -> None:
        self._poster.shutdown()

    def send(self, body: dict[str, Any], payload: Payload, tensors: int, nbytes: int) -> None:
        """Post a body once the one before it was answered; raises what that answer raised."""
        self.finish()
        answer = self._poster.submit(self._post, body)
        self._in_flight = _InFlight(answer, payload, tensors, nbytes)

    def finish(self) -> None:
        """Wait for the answer that is still to come."""
        sent, self._in_flight = self._in_flight, None
        if sent is None:
            return
        sent.answer.result()
        if sent.payload.lease is not None:
            sent.payload.lease.end()
        self.buckets += 1
        self.tensors, self.nbytes = self.tensors + sent.tensors, self.nbytes + sent.nbytes
        if self._on_bucket is not None:
            self._on_bucket(self.tensors, self.nbytes)
