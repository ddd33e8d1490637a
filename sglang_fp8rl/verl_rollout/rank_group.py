"""The trainer ranks of one server: what fails on one of them fails on all, and none is left waiting."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from ..errors import RefitError

T = TypeVar("T")
logger = logging.getLogger(__name__)


class RankGroup:
    """Args:
    mesh: of these ranks; the first leads.
    leads: whether this rank talks to the server.
    """

    def __init__(self, mesh: DeviceMesh, leads: bool) -> None:
        self._mesh, self._leads = mesh, leads
        self._first = mesh.mesh.tolist()[0]

    async def by_leader(self, ask: Callable[[], Awaitable[T]]) -> T:
        """What the leading rank was answered, on all ranks.

        Raises:
            RefitError: on every rank, whatever was raised on the leading one.
        """
        outcome: Any = await outcome_of(ask) if self._leads else None
        if self._mesh.size() > 1:
            values = [outcome]
            dist.broadcast_object_list(values, src=self._first, group=self._mesh.get_group())
            outcome = values[0]
        if isinstance(outcome, RefitError):
            raise outcome
        return outcome

    def gather(self, own: Any) -> list[Any]:
        """What every rank has, on the first; nothing on the others."""
        if self._mesh.size() == 1:
            return [own]
        is_first = self._mesh.get_local_rank() == 0
        gathered: list[Any] | None = [None] * self._mesh.size() if is_first else None
        dist.gather_object(own, gathered, dst=self._first, group=self._mesh.get_group())
        return gathered or []


async def outcome_of(ask: Callable[[], Awaitable[Any]]) -> Any:
    """What it returned; or the `RefitError` that says what it raised, for `RankGroup` to hand round."""
    try:
        return await ask()
    except RefitError as error:
        return error
    except Exception as error:  # raised on all ranks: one alone would leave the others waiting
        logger.warning("fp8rl: a refit fails on all ranks of its server", exc_info=True)
        return RefitError(
            "a refit",
            f"{type(error).__name__}: {error}",
            "what one rank of a server's group raises ends the refit on all of them",
            "The log of that rank has the traceback; send all weights again.",
        )


class FirstFailure:
    """veRL's HTTP adapter, as its own way of sending uses it: the first failure is kept for all ranks.

    Nothing is asked after it. Raised at once, it would leave the other ranks in the next gather.
    """

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self.error: RefitError | None = None

    def __getattr__(self, name: str) -> Callable[..., Awaitable[Any]]:
        method = getattr(self._engine, name)

        async def ask(*args: Any, **kwargs: Any) -> Any:
            if self.error is None:
                answer = await outcome_of(lambda: method(*args, **kwargs))
                self.error = answer if isinstance(answer, RefitError) else None
                return answer
            return None

        return ask
