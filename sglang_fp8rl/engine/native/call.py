"""One pass through `model.load_weights`: opened and closed here, and what is known of it meanwhile."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch

from ...errors import MAX_LISTED, RefitError
from ..arrival.bucket import Bucket
from ..arrival.sent_tensors import Source, SourceIndex
from ..arrival.update import Origin, Update
from ..report.report import Arrived, RefitReport
from .observer import Observer
from .pairs import PairTable
from .recording import Recording


@dataclass
class Call:
    """What is known of a call while it runs.

    Attributes:
        update: that it belongs to.
        bucket: what came; None for a stream, which has to be read to be known.
        brings: what is known of it before it is read; None as long as nothing was looked at.
        recording: what the loaders do with this bucket, where it may be replayed later.
        errors: names, and what went wrong with them.
        raised: what was raised at a write, by name and place, and not made good: subject and text. Some models
            catch what their loaders raise, and a thread's is nobody's.
        touched: names that reached the model.
        stopped_at: the name whose loader raised.
        not_finite: per write, the name and a bool tensor of blocks that kept their old bytes.
        unneeded: names that the model does without, and that may pass.
        kv_scales: names of scales that were read, and are to be read again when the bucket comes again.
        observer: of what happens besides.
        lane: what the loaders do is done in it, whichever thread they run in.
    """

    update: Update
    bucket: Bucket | None = None
    brings: Arrived | None = None
    recording: Recording | None = None
    errors: dict[str, str] = field(default_factory=dict)
    raised: dict[tuple, tuple[str, str]] = field(default_factory=dict)
    touched: set[str] = field(default_factory=set)
    stopped_at: str = ""
    not_finite: list[tuple[str, torch.Tensor]] = field(default_factory=list)
    unneeded: list[str] = field(default_factory=list)
    kv_scales: list[str] = field(default_factory=list)
    lane: Callable[[], AbstractContextManager[None]] = nullcontext
    observer: Observer = field(init=False)

    @cached_property
    def sources(self) -> SourceIndex:
        """The tensors that went by."""
        return SourceIndex(keeps_tensors=not self.update.origin.is_alone)

    def touch(self, sources: Iterable[Source]) -> None:
        """These sent tensors reached the model."""
        self.sources.consume(sources)
        self.touched.update(source.name for source in sources)

    @property
    def size(self) -> int:
        """Tensors that were sent."""
        if self.brings is None or self.bucket is None:  # a stream
            return len(self.sources.names)
        return len(self.brings.numbers)

    @property
    def error(self) -> RefitError:
        """All that went wrong, in one error."""
        texts = list(dict.fromkeys(self.errors.values()))
        return RefitError(
            f"an update of {self.size} tensor(s)",
            " | ".join(texts[:MAX_LISTED]),
            f"{len(self.errors)} of them had problems, everything else in this call was stored",
            "Mend what is named and send it again.",
        )


class Calls:
    """Opens and closes the calls of a model, each of one of the report's refits.

    Args:
        finished: told of a call that came to its end.
        stopped: told of one that an error ended; returns the error to raise.

    Attributes:
        update: the request that is being served; the load at startup where there is none.
        running: the call that runs now.
    """

    def __init__(
        self,
        report: RefitReport,
        pairs: PairTable,
        finished: Callable[[Call], object],
        stopped: Callable[[Call, Exception], Exception],
    ) -> None:
        self._report, self._pairs = report, pairs
        self._finished, self._stopped = finished, stopped
        self.update = Update(Origin.STARTUP)
        self.running: Call | None = None

    @contextmanager
    def during(self, update: Update) -> Iterator[Update]:
        """Calls in here belong to that request."""
        before, self.update = self.update, update
        try:
            yield update
        finally:
            self.update = before

    @contextmanager
    def probing(self, call: Call) -> Iterator[None]:
        """`call` runs inside whatever else does; it stores nothing and is not written down."""
        before, self.running = self.running, call
        try:
            yield
        finally:
            self.running = before

    @contextmanager
    def one(self) -> Iterator[Call]:
        """One call: what it left out is found and written down, also where an error stopped it.

        Raises:
            RefitError: something that was sent was not stored; names all of it.
        """
        call = self.running = Call(self.update)
        self.update.calls += 1
        try:
            with torch.no_grad():
                yield call
        except Exception as error:
            told = self._stopped(call, error)
            if told is error:
                raise
            raise told from error
        else:
            self._finished(call)
            if call.errors:
                raise call.error
        finally:
            call.sources.forget_tensors()
            self.running = None

    def expect(self, call: Call, bucket: Bucket | None, brings: Arrived | None) -> None:
        """The call begins, of the running refit or of a new one. `brings`: of a bucket that came before."""
        if brings is None:
            names, nbytes = ((), 0) if bucket is None else (bucket.names, bucket.nbytes)
            brings = Arrived(self._report.brought.numbers_of(names), nbytes, has_taken=False)
        since = self._report.start_call(call.update, brings.numbers)
        if self._pairs.halves:
            self._pairs.drop_before(since)
        call.bucket, call.brings, call.update.refit = bucket, brings, self._report.refit


class StreamLane:
    """The current stream of a device, as the thread that makes this object has it.

    Models of DeepSeek's family hand their experts to a thread pool. A new thread has the default stream
    (and the first device) as its own, while the scheduler works on another stream, and reads there
    whether what was cast was finite: without waiting, it would read before the cast has run.
    """

    def __init__(self, device: torch.device) -> None:
        self._module: Any = torch.get_device_module(device)
        self._stream = self._module.current_stream(device)
        self._thread = threading.get_ident()

    @contextmanager
    def entered(self) -> Iterator[None]:
        """What is queued in here goes to that stream, of that device, in any thread."""
        if threading.get_ident() == self._thread:
            yield
            return
        with self._module.stream(self._stream):
            yield
