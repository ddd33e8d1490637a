"""Requests to one server: its address, its keys, and each answer that is no success as an error."""

from __future__ import annotations

import math
import os
import time
from http import HTTPStatus
from typing import Any

import requests

from ..errors import NoAnswerError, RefitError
from ..wire.plan import PLAN_PATH, STATUS_PATH, RefitPlan

SERVER_INFO_PATH = "/server_info"
# SGLang takes the api key here. At whatever changes a server, and at the fingerprint, it takes the admin key
# where it has one, and no other.
_FOR_THE_API_KEY = ("/generate", SERVER_INFO_PATH, PLAN_PATH, STATUS_PATH)
# SGLang closes what is idle for 5: a request that comes just then would get no answer.
_IDLE_SECONDS = 2
_KEYS = (
    "RefitClient(api_key=…, admin_api_key=…), or --api-key and --admin-api-key of a command: SGLang wants the "
    "admin key for updates, sessions and fingerprints where it has one, the api key otherwise."
)
_REMEDIES: dict[int, str] = {
    HTTPStatus.UNAUTHORIZED: _KEYS,
    HTTPStatus.FORBIDDEN: _KEYS,
    HTTPStatus.NOT_FOUND: "Start it with --quantization fp8_blockwise_online and this version of sglang-fp8rl.",
}
_REMEDY = (
    "It goes on serving, and GET /fp8rl/status names what is old. Compare what was sent with GET "
    "/fp8rl/plan, which has its names and shapes; `sglang-fp8rl doctor` and its log say more."
)

_SESSION_OPEN = "session is already open"  # SGLang's words
_CLOSE_SESSION = (
    "If the client that opened it is gone or was interrupted, call RefitClient.close_session(), then send the update "
    "again, whole; else wait for it."
)
_RESTART = "A trainer that can't restart a server (veRL can't) goes on from its last checkpoint."
_UNANSWERED = (
    "a running server gives one",
    f"Look whether it is up, and whether the URL is right. {_RESTART}",
)
_UNANSWERED_UPDATE = (
    "a running server gives one; without it, it is not known whether it did what it was asked",
    "Look whether it is up; its log says why it is not. Unless last_refit in GET /fp8rl/status has this update's "
    f"version and outcome ok, send the update again, whole. {_RESTART}",
)


class Connection:
    """One HTTP session; args as `RefitClient`. Every method raises `NoAnswerError` where the server can't be
    reached or takes too long, and all but `flush_cache` raise `RefitError` for an answer that is no success.

    Attributes:
        seconds_waited: for answers, since the start.
        info: what `server_info` was answered; None where it is to be asked.
    """

    def __init__(
        self,
        url: str,
        timeout: float,
        api_key: str | None = None,
        admin_api_key: str | None = None,
    ) -> None:
        _refuse_options(timeout, api_key=api_key, admin_api_key=admin_api_key)
        self.url, self._timeout = url.rstrip("/"), timeout
        self.seconds_waited, self._used = 0.0, time.monotonic()
        self.forget()
        self._http, self._process = requests.Session(), os.getpid()
        self._api_key, self._admin_key = api_key, admin_api_key or api_key

    def get(self, path: str) -> dict[str, Any]:
        """The JSON object that the server answers."""
        return _content(self._ask("GET", path))

    def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """As `get`."""
        return _content(self._ask("POST", path, json=body))

    def forget(self) -> None:
        """What the server can do is to be asked again: something failed, and it may be another one by now."""
        self.info: Any = None
        self._unknown: set[str] = set()

    def server_info(self) -> Any:
        """`GET /server_info`, asked once."""
        info = self.info or self.get(SERVER_INFO_PATH)
        if not isinstance(info.get("tp_size"), int):
            raise _not_sglang(self.url + SERVER_INFO_PATH, info)
        self.info = info
        return info

    def plan_unless(self, digest: str) -> RefitPlan | None:
        """`GET /fp8rl/plan`; None where it is the plan of that digest, which alone goes over the wire then."""
        answer = self._ask("GET", PLAN_PATH, headers={"If-None-Match": f'"{digest}"'})
        if answer.status_code == HTTPStatus.NOT_MODIFIED:
            return None
        found = RefitPlan.from_dict(_content(answer))
        return None if found.digest == digest else found  # what is between may drop the header

    def post_if_known(self, path: str, body: dict[str, Any]) -> bool:
        """As `post`; False if the server has no such endpoint, which it is asked once."""
        if path in self._unknown:
            return False
        answer = self._ask("POST", path, json=body)
        if answer.status_code == HTTPStatus.UNAUTHORIZED:
            # SGLang asks for the api key where it knows no such endpoint, before it says so.
            answer = self._ask("POST", path, takes_api_key=True, json=body)
        if answer.status_code == HTTPStatus.NOT_FOUND:
            self._unknown.add(path)
            return False
        _content(answer)
        return True

    def flush_cache(self, timeout: float) -> bool:
        """Let the server drop what the old weights computed; it waits `timeout` seconds for running requests.
        Returns whether it was done."""
        path = f"/flush_cache?timeout={timeout}"
        return self._ask("POST", path, patience=timeout, json={}).ok

    def _ask(
        self,
        method: str,
        path: str,
        *,
        takes_api_key: bool = False,
        patience: float = 0,
        headers: dict[str, str] | None = None,
        json: Any = None,
    ) -> requests.Response:
        takes_api_key = takes_api_key or path in _FOR_THE_API_KEY
        key = self._api_key if takes_api_key else self._admin_key

        def with_key(request: requests.PreparedRequest) -> requests.PreparedRequest:
            request.headers.update(Authorization=f"Bearer {key}")
            return request

        auth = with_key if key else None  # as a header alone, what ~/.netrc says would replace it
        url, seconds = self.url + path, self._timeout + patience
        direct = {"no_proxy": "*"}  # weights are sent to this machine, whatever HTTP_PROXY says
        if self._process != os.getpid():  # a fork, whose answers the other process would read
            self._http, self._process = requests.Session(), os.getpid()
        if time.monotonic() - self._used > _IDLE_SECONDS:
            self._http.close()  # the next request opens a connection of its own
        try:
            answer = self._http.request(
                method,
                url,
                json=json,
                headers=headers,
                timeout=seconds,
                proxies=direct,
                auth=auth,
                allow_redirects=False,  # a POST would become a GET, and lose its key
            )
        except requests.RequestException as error:
            self.forget()
            told = _UNANSWERED if method == "GET" else _UNANSWERED_UPDATE
            raise NoAnswerError(url, f"no answer: {error}", *told) from error
        self._used = time.monotonic()
        self.seconds_waited += answer.elapsed.total_seconds()
        if answer.is_redirect:
            raise RefitError(
                url,
                f"HTTP {answer.status_code}, a redirect to {answer.headers['Location'][:200]}",
                "a server is asked where it is: who follows loses the request's body or its key",
                "Give the URL that it redirects to, without the path.",
            )
        return answer


def _refuse_options(timeout: Any, **keys: Any) -> None:
    if not (isinstance(timeout, (int, float)) and 0 < timeout < math.inf):
        rule = "a request ends after so many seconds, more than 0"
        raise RefitError("timeout", repr(timeout), rule, "Give a number, e.g. 600.")
    for name, key in keys.items():
        if key and not (
            isinstance(key, str) and key.isascii() and key.isprintable() and key == key.strip()
        ):
            raise RefitError(
                name,
                f"a {type(key).__name__} that is not shown here",
                "a key is a str of printable ASCII, with no space or line end around it",
                "Give it as it was given to the server; what was read from a file by .strip().",
            )


def _content(answer: requests.Response) -> dict[str, Any]:
    try:
        content: Any = answer.json()
    except requests.JSONDecodeError:
        content = answer.text
    is_told = isinstance(content, dict)
    if answer.ok and not is_told:
        raise _not_sglang(answer.url, content)
    if answer.ok and content.get("success") is not False:
        return content
    said = content.get("message", content) if is_told else content
    remedy = _CLOSE_SESSION if _SESSION_OPEN in str(said) else _REMEDY
    raise RefitError(
        f"{answer.request.method} {answer.request.path_url}",
        f"HTTP {answer.status_code}",
        f"the server answered: {str(said).rstrip('.')}",
        _REMEDIES.get(answer.status_code, remedy),
    )


def _not_sglang(url: str, content: Any) -> RefitError:
    return RefitError(
        url,
        f"answers {str(content)[:200]!r}",
        "SGLang answers a JSON object there, with what it is asked for",
        "Look whether the URL is the server's own: a proxy, a login page or another program answers.",
    )
