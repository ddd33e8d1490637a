"""Where a request ends: every rank says what went wrong there, and all of them answer alike.

A NaN may be in a shard that rank 0 never sees, and only rank 0's answer reaches the client.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any, ClassVar

import torch

from ...errors import RefitError
from ...versions import RECORDS_WEIGHT_VERSIONS
from ...wire.refit_note import with_version, without_versions
from ...wire.staging import OPEN_BUFFERS
from ..arrival.update import Update
from ..native.calls import NOTHING_SENT
from ..refit import ModelRefit
from .boundary import Boundary
from .flush import forget_embeddings
from .metrics import observe_refit

_NOTHING_SEEN = RefitError(
    "the update",
    "no call of model.load_weights",
    "what reaches the weights in another way is not quantized, and is not known here",
    "Send all weights again, with load_format='flattened_bucket' or without one.",
)


@dataclass(frozen=True)
class Said:
    """What one rank says of a request.

    Attributes:
        error: why it failed there.
        flushed: as `Update.cache_flushed`.
        is_empty: whether no tensor came in what was loaded.
        refit: the number of the refit that the request belongs to; 0 where there is none.
    """

    error: str | None = None
    flushed: bool | None = None
    is_empty: bool = False
    refit: int = 0


_REFIT = attrgetter("refit")


@dataclass
class RequestEnd:
    """Behind an update request, or the end of a session, on one rank.

    Attributes:
        result: of this rank; it tells the client of all ranks' failures afterwards.
        is_asked: whether SGLang was asked at all: where one rank refused, none was.
    """

    boundary: Boundary
    manager: Any
    refit: ModelRefit
    update: Update
    result: Any
    is_asked: bool = True
    said: ClassVar[type[Said]] = Said

    def answer(self) -> Any:
        """What the client is told, once all ranks have agreed. A collective."""
        step, refit, update, result = self.boundary.step, self.refit, self.update, self.result
        ended = self._end_together()
        step(forget_embeddings)
        if update.ends_session:
            for extension in refit.extensions:
                extension.drop_session()  # it is over, whatever was raised there
            for extension in refit.extensions:
                step(extension.end_session, self.manager)
        elif self.is_asked:
            for extension in refit.extensions:
                step(extension.end_request, was_flushed=bool(update.cache_flushed))
        if update.is_last_call or not result.success:
            step(OPEN_BUFFERS.close)  # a refit that goes on brings its handles anew
        result.message = without_versions(result.message)
        version = step(self._told, ended)
        if fail_behind(self.boundary, self.manager, refit, ended, result):  # as on every rank
            version = None
        result.message = with_version(result.message, version)
        if version and RECORDS_WEIGHT_VERSIONS:
            scheduler = self.manager.scheduler
            step(lambda: scheduler.record_weight_version_change(new_version=version))
        call = None if update.ends_session else update.origin.value
        step(observe_refit, self.manager, refit, call, result.success)  # as it is answered
        return result

    def _told(self, ended: Any) -> str | None:
        """Returns what the weights are called from now on; None if that does not change."""
        return self.update.version if self.result.success else None

    def _end_together(self) -> Any:
        """The ranks agree on how the request ended; returns what ended with it. A collective."""
        ranks = self._gathered()
        if len(set(map(_REFIT, ranks))) > 1:  # the same on every rank
            self.boundary.step(self._join, max(map(_REFIT, ranks)))
            ranks = self._gathered()
        raised = tuple(self.boundary.errors)
        self.boundary.errors.clear()  # what is raised from here on, `fail_behind` reports
        ended, result = self.boundary.step(self._decide, ranks), self.result
        # Where the request had failed by itself, that is told first.
        if untold := [text for text in raised if text not in result.message]:
            result.message = " | ".join([result.message, *untold])
        return ended

    def _gathered(self) -> list[Said]:
        """What every rank says. A collective."""
        boundary = self.boundary
        own = boundary.step(self._said) or self.said()
        if boundary.errors:
            own = replace(own, error=own.error or " | ".join(boundary.errors))
        return boundary.gathered(own)

    def _join(self, newest: int) -> None:
        """Join the refit of that number, which began on other ranks."""

    def _said(self) -> Said:
        error = " | ".join(filter(None, (self._failure(), *self._halves())))
        return Said(error or None, self.update.cache_flushed, self._is_empty)

    def _failure(self) -> str | None:
        """Why this rank failed, where it did."""
        update, result = self.update, self.result
        # A cache that could not be flushed behind weights that are stored is no failure of the update.
        if self.is_asked and not result.success and update.cache_flushed is not False:
            return result.message
        is_seen = update.calls or update.ends_session or not update.touches_target
        if self.is_asked and not is_seen:
            result.success, result.message = False, str(_NOTHING_SEEN)
            return result.message
        return None

    def _halves(self) -> tuple[str, ...]:
        """Of FP8 pairs, the halves that never met until the end of a session."""
        return tuple(self.refit.pairs.give_up().values()) if self.update.ends_session else ()

    @property
    def _is_empty(self) -> bool:
        return self.update.calls > 0 and not self.update.tensors

    def _decide(self, ranks: Sequence[Any]) -> Any:
        """The same on every rank; returns what ended."""
        update = self.update
        if update.cache_flushed is None and any(one.flushed for one in ranks):
            # A rank that failed asked for no flush; its prefixes would not be those of the others.
            update.cache_flushed = bool(self.manager.flush_cache())
        errors = {rank: one.error for rank, one in enumerate(ranks) if one.error is not None}
        if not errors and (wrong := self._wrong_between(ranks)):
            errors = dict.fromkeys(range(len(ranks)), str(wrong))
        return self._fail(errors, ranks) if errors else self._concluded(ranks)

    def _wrong_between(self, ranks: Sequence[Any]) -> RefitError | None:
        """What is wrong with what came on all ranks together, though none failed."""
        return NOTHING_SENT if all(one.is_empty for one in ranks) else None

    def _fail(self, errors: dict[int, str], ranks: Sequence[Any]) -> Any:
        """Some rank failed, so all did; `errors` are by rank. Returns what ended."""
        own, result = torch.distributed.get_rank(self.boundary.group), self.result
        if own not in errors:
            result.success, result.message = False, " | ".join(texts_of(errors, own))
        elif result.success:
            result.success, result.message = False, errors[own]

    def _concluded(self, ranks: Sequence[Any]) -> Any:
        """What ends with a request that failed nowhere; nothing, where nobody keeps a record of it."""
        return None


def texts_of(errors: dict[int, str], own: int) -> list[str]:
    """What went wrong on each rank, in words."""
    return [text if rank == own else f"tp_rank {rank}: {text}" for rank, text in errors.items()]


def request_end(refit: ModelRefit) -> type[RequestEnd]:
    """What ends the requests of a model."""
    kinds = (one.request_end for one in refit.extensions)
    return next((kind for kind in kinds if kind is not None), RequestEnd)


def fail_behind(
    boundary: Boundary, manager: Any, refit: ModelRefit, ended: Any = None, result: Any = None
) -> list[str]:
    """What was raised behind the end of a request, on any rank, fails it and what it ended after all; return it.
    Metrics say what is served then. A collective.

    Args:
        ended: as of `RequestEnd`; None if the request has none.
        result: None if the answer can't say so; then only the status does.
    """
    boundary.step(observe_refit, manager, refit)  # here, where what it raises is told
    errors = boundary.failures()
    if not errors:
        return errors
    if result is not None:
        told = [] if result.success else [result.message]
        result.success, result.message = False, " | ".join([*told, *errors])
    for extension in refit.extensions:
        before = len(boundary.errors)
        boundary.step(extension.fail_served, errors, ended)
        if ended is not None and len(boundary.errors) > before:
            boundary.step(extension.fail_served, errors, None)
    boundary.step(observe_refit, manager, refit)
    return errors
