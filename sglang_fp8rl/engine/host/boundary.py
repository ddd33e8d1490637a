"""Where an exception between a request and its answer becomes a failed answer on every rank.

SGLang's scheduler ends with what its request handlers raise, and a rank that raised leaves the others waiting
in the next collective. So all that this package does there is either a *step* of this rank alone, in which
anything may be raised, or a collective that every rank enters whatever became of its steps.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from typing import Any, ParamSpec, TypeVar

import torch

from ...errors import Fp8RlError

logger = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")


class Boundary:
    """Around one request, on this rank.

    Attributes:
        group: of all ranks that serve the request, on a CPU backend.
        errors: what this rank's steps raised, in words.
    """

    def __init__(self, group: Any) -> None:
        self.group = group
        self.errors: list[str] = []

    def step(self, act: Callable[P, T], *args: P.args, **kw: P.kwargs) -> T | None:
        """What `act` returns; None if it raises, which `errors` says then."""
        try:
            return act(*args, **kw)
        except Exception as error:
            # The boundary of a request: today this ends the scheduler and with it the server. It is
            # answered instead, and nothing goes on as if it had worked.
            logger.exception("fp8rl: a request failed")
            is_ours = isinstance(error, Fp8RlError)  # then it says what to do
            self.errors.append(str(error) if is_ours else f"{type(error).__name__}: {error}")
            return None

    def asked(
        self,
        original: Callable[..., T],
        *args: Any,
        around: ExitStack | None = None,
        has_barrier: bool = True,
    ) -> T:
        """What SGLang answers inside of `around`. Raises what it raises, or what the end of `around` does.

        Args:
            has_barrier: whether SGLang ends with one; where it raises before, the other ranks wait there.
        """
        with around or nullcontext():
            try:
                return original(*args)
            except Exception:
                if has_barrier:
                    torch.distributed.barrier(group=self.group)
                raise

    def is_fine(self) -> bool:
        """Whether no step of any rank has raised. A collective."""
        return self.on_every_rank(not self.errors)

    def on_every_rank(self, holds: bool) -> bool:
        """What decides whether ranks enter a collective is the same on each of them. A collective."""
        if torch.distributed.get_world_size(self.group) == 1:
            return holds
        all_hold = torch.tensor([int(holds)])
        torch.distributed.all_reduce(all_hold, torch.distributed.ReduceOp.MIN, group=self.group)
        return bool(all_hold.item())

    def gathered(self, own: Any) -> list[Any]:
        """What every rank says, by rank. A collective."""
        size = torch.distributed.get_world_size(self.group)
        if size == 1:
            return [own]
        found: list[Any] = [None] * size
        torch.distributed.all_gather_object(found, own, group=self.group)
        return found

    def failures(self) -> list[str]:
        """What steps raised, each with its rank, this rank's own first; empty if none did. A collective."""
        if self.is_fine():
            return []
        rank = torch.distributed.get_rank(self.group)
        ranks = self.gathered(list(self.errors))
        others = [
            f"tp_rank {at}: {text}" for at, one in enumerate(ranks) if at != rank for text in one
        ]
        return [*self.errors, *others]
