"""One bucket is on its way while the next one is made."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from ..wire.bucket import Payload

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
