"""What a server does beside serving: one line each, and what such a folder may do. Without both the rest serves on."""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any, ClassVar, NamedTuple

import torch

_EXTENSIONS = (
    "law.extension:LawOfServer",
    "replay.extension:Replay",
    "plan.extension:Plan",
    "proof.extension:Fingerprints",
    "kv_scales.extension:KvScaling",
)


@functools.cache
def extensions() -> tuple[type[Extension], ...]:
    """By name, at the first model or route: nothing that serves imports them."""
    found = (path.split(":") for path in _EXTENSIONS)
    return tuple(getattr(import_module(f".{module}", __package__), name) for module, name in found)


class Way(NamedTuple):
    """How a bucket is written without SGLang's loaders.

    Attributes:
        brings: what is known of the bucket (`ledger.ledger.Arrived`).
        write: do it, in a `Call`.
    """

    brings: Any
    write: Callable[[Any], None]


@dataclass
class Received:
    """Tensors that no parameter takes: `taken` ones are to be read again when their bucket comes again,
    `ignored` ones are not needed, and `errors` says what is wrong with others."""

    taken: list[str] = field(default_factory=list)
    ignored: list[str] = field(default_factory=list)
    errors: dict[str, str] = field(default_factory=dict)


class Extension:
    """What is on the class, every server has; an object takes part in the updates of one served model.

    A method that is not overridden does nothing.

    Attributes:
        routes: path to what answers it, in the process that serves HTTP.
        admin_routes: the same, for those who may change the server.
        gauges: of Prometheus, name to description.
        mark: with which the requests for the internal state begin that `answer` is for.
        section: of the status; null where there is nothing to do.
        request_end: a class in the place of `host.request_end.RequestEnd`.
    """

    routes: ClassVar[Mapping[str, Callable[[Any], Awaitable[Any]]]] = {}
    admin_routes: ClassVar[Mapping[str, Callable[[Any], Awaitable[Any]]]] = {}
    gauges: ClassVar[Mapping[str, str]] = {}
    mark: ClassVar[str | None] = None
    section: ClassVar[str | None] = None
    request_end: ClassVar[type | None] = None

    def __init__(self, refit: Any) -> None:
        self.refit = refit  # the model's `ModelRefit`, still being made: kept here, not asked

    def start(self, runner: Any) -> bool:
        """SGLang has loaded the model and knows its cache's dtype; nothing has run yet.

        Returns:
            whether there is anything to do for this model; else nothing of the object is called any more.
        """
        return True

    def unfolded(self) -> AbstractContextManager[None]:
        """Weights are as they were sent in here: somebody loads them, or reads them to compare or to keep."""
        return nullcontext()

    def way_of(self, bucket: Any) -> Way | None:
        """Return how a bucket (`arrival.bucket.Bucket`) is written without SGLang's loaders, if that is known."""
        return None

    def begin(self, call: Any) -> None:
        """A `native.call.Call` begins: nothing of it was written."""

    def refused(self, update: Any, error: Exception) -> None:
        """A call of this `arrival.update.Update` could not begin."""

    def closed(self, call: Any) -> None:
        """A call has ended; its `errors` say what of it was not stored."""

    def stored(self, call: Any) -> None:
        """Behind a call of which everything was stored."""

    def receive(self, sent: Mapping[str, torch.Tensor], *, is_serving: bool) -> Received:
        """Take tensors that no parameter takes; `is_serving` is false while the checkpoint is loaded."""
        return Received()

    def begin_session(self, note: Any) -> None:
        """A client opens a session, on every rank; `note` (`wire.refit_note.RefitNote`) says what is to come, or None."""

    def drop_session(self) -> None:
        """The session is over, or did not open."""

    def weights_lost(self) -> None:
        """The memory of the served weights was given back."""

    def fail_served(self, errors: list[str], ended: Any) -> None:
        """These things went wrong behind all that a request did; `ended` is what it ended, see
        `host.request_end.fail_behind`."""

    def end_request(self, *, was_flushed: bool) -> None:
        """Behind an update request that SGLang was asked, on every rank; `was_flushed` is this rank's cache."""

    def end_session(self, manager: Any) -> None:
        """Behind the end of a session, on every rank; `manager` is SGLang's weight updater."""

    def cache_is_empty(self, manager: Any) -> bool:
        """SGLang has just flushed its cache, on every rank, outside of updates; returns whether it may say so."""
        return True

    def status(self) -> dict[str, Any] | None:
        """Return the `section`, without reading anything off the device."""
        return None

    def add_to_status(self, status: dict[str, Any]) -> None:
        """Add to a status more than a section, which reads nothing off the device either."""

    @staticmethod
    def planned(refit: Any) -> dict[str, Any]:
        """Sections of the plan."""
        return {}

    @staticmethod
    def badness(status: Mapping[str, Any]) -> tuple[int, ...]:
        """Rank a replica's status among those of others; the worst one is shown."""
        return ()

    @staticmethod
    def measured(status: Mapping[str, Any]) -> Mapping[str, float]:
        """The gauges that a status has a number for."""
        return {}

    def answer(self, scheduler: Any, asked: str) -> dict[str, Any]:
        """The internal state for a request with its mark, on every rank, where nothing may be raised."""
        raise NotImplementedError
