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
    """The ranks of a mesh, the first of which leads: it talks to the server.

    Attributes:
        leads: whether this one does.
    """

    def __init__(self, mesh: DeviceMesh) -> None:
        self._mesh, self._first = mesh, mesh.mesh.tolist()[0]
        self.leads: bool = mesh.get_local_rank() == 0

    async def by_leader(self, ask: Callable[[], Awaitable[T]]) -> T:
        """What the leading rank was answered, on all ranks.

        Raises:
            RefitError: on every rank, whatever was raised on the leading one.
        """
        return self.share(await outcome_of(ask) if self.leads else None)

    def share(self, outcome: Any) -> Any:
        """The leading rank's, on all ranks; raised if it is a `RefitError`."""
        values = [outcome]
        dist.broadcast_object_list(values, src=self._first, group=self._mesh.get_group())
        if isinstance(values[0], RefitError):
            raise values[0]
        return values[0]

    def gather(self, own: Any) -> list[Any]:
        """What every rank has, on the first; nothing on the others."""
        gathered: list[Any] | None = [None] * self._mesh.size() if self.leads else None
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
