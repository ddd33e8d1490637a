"""Requests of veRL's adapter to its server: one try each, and what went wrong in one error."""

from __future__ import annotations

import asyncio
from http import HTTPStatus
from typing import Any

import aiohttp

from ..errors import RefitError


class Server:
    """One SGLang server, asked over HTTP.

    Args:
        url: without a slash at its end.
        patience: seconds for one request.
    """

    def __init__(self, url: str, patience: float) -> None:
        self.url, self.patience = url, patience

    async def post(self, endpoint: str, body: dict[str, Any] | None = None) -> Any:
        """The answer as JSON.

        Raises:
            RefitError: it was refused, with the server's words; or there was no answer.
        """
        return await self._ask("POST", endpoint, body or {})

    async def get(self, endpoint: str, *, or_not: HTTPStatus) -> Any:
        """The answer as JSON; None if the server answers `or_not`.

        Raises:
            RefitError: as `post`.
        """
        return await self._ask("GET", endpoint, None, or_not)

    async def _ask(
        self, method: str, endpoint: str, body: Any, or_not: HTTPStatus | None = None
    ) -> Any:
        timeout = aiohttp.ClientTimeout(total=self.patience)
        try:
            async with (
                aiohttp.ClientSession(timeout=timeout) as http,
                http.request(method, f"{self.url}/{endpoint}", json=body) as answer,
            ):
                if answer.status == or_not:
                    return None
                if not answer.ok:
                    raise _refused(f"{method} /{endpoint}", answer.status, await answer.text())
                is_json = "json" in answer.headers.get("content-type", "")
                return await answer.json() if is_json else await answer.text()
        except (aiohttp.ClientError, asyncio.TimeoutError) as error:
            raise RefitError(
                f"{method} {self.url}/{endpoint}",
                f"no answer ({type(error).__name__}: {error})",
                "weights go to a server that runs; the one that this rollout started is gone, or "
                f"took longer than {self.patience:.0f} s",
                "The log of its actor (sglang_server_*) says why. veRL does not start it again: go "
                "on from the last checkpoint of the training.",
            ) from error


def _refused(request: str, status: int, text: str) -> RefitError:
    return RefitError(
        request,
        f"HTTP {status}",
        f"the server answered: {text[:2000]}",
        "It goes on serving; GET /fp8rl/status names what is old. Compare the trainer's model with "
        "the server's: `GET /fp8rl/plan` has its names and shapes.",
    )
