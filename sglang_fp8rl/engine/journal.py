"""Every call of `load_weights` is opened here and closed here, whatever happens in it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch

from ..errors import Fp8RlError, RefitError
from .arrival.kinds import KnownBucket, NewBucket, Stream
from .arrival.update_scope import STARTUP, UpdateScope
from .audit import Audit
from .model.derived_weights import DerivedWeights
from .native.call import Call
from .native.checks import foreign_error
from .replay.recipe import Recipe
from .report.refit_record import Refit
from .report.report import Arrived, RefitReport

Arrival = Stream | NewBucket | KnownBucket[Recipe]


@dataclass
class Update:
    """One request of SGLang's, while it is served.

    Attributes:
        calls: of `load_weights` that belong to it.
        refit: that its last call belongs to.
        cache_flushed: whether SGLang flushed its cache; None if it was not asked to.
        error: what ended it, if that was an exception; not of a refused flush.
    """

    scope: UpdateScope
    calls: int = 0
    refit: Refit | None = None
    cache_flushed: bool | None = None
    error: str | None = None


class Journal:
    """Opens and closes calls; keeps what they belong to.

    Attributes:
        update: the request that is being served; the load at startup where there is none.
        running: the call that runs now.
    """

    def __init__(self, report: RefitReport, audit: Audit, derived: DerivedWeights) -> None:
        self._report, self._audit, self._derived = report, audit, derived
        self.update = Update(STARTUP)
        self.running: Call | None = None
        self._arrival: Arrival | None = None

    @contextmanager
    def during(self, scope: UpdateScope) -> Iterator[Update]:
        """Calls in here belong to a request of that scope."""
        before, self.update = self.update, Update(scope)
        try:
            yield self.update
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
    def call(self) -> Iterator[Call]:
        """One call: audited and written down, also where it was stopped by an error.

        Raises:
            RefitError: something that was sent was not stored; names all of it.
        """
        call = self.running = Call(self.update.scope)
        self.update.calls += 1
        try:
            with torch.no_grad():
                yield call
        except Exception as error:
            told = error if isinstance(error, Fp8RlError) else self._foreign(call, error)
            self._stop(call, told)
            if len(call.errors) > 1:
                told = call.error(self._count(call))
            if told is error:
                raise
            raise told from error
        else:
            self._audit.finish(call, self._count(call))
            self._close(call)
            if call.errors:
                raise call.error(self._count(call))
        finally:
            call.sources.forget_tensors()
            self.running = self._arrival = None

    def _foreign(self, call: Call, error: Exception) -> RefitError:
        call.stopped_at = call.sources.latest
        return foreign_error(call.stopped_at, error, self._report.known_names)

    def expect(self, arrival: Arrival) -> None:
        """What the running call brings, as far as that can be known before it is read."""
        self._arrival = arrival
        match arrival:
            case KnownBucket(recipe=recipe):
                numbers = recipe.numbers
            case NewBucket(bucket=bucket):
                numbers = self._report.brought.numbers_of(bucket.names)
            case Stream():
                numbers = np.empty(0, np.int64)
        halves_wait = self._audit.halves_wait
        if self._report.start_call(self.update.scope, numbers, halves_wait=halves_wait):
            self._audit.drop_halves()
        self.update.refit = self._report.refit

    def _stop(self, call: Call, error: Exception) -> None:
        """An error ended the call: what was found before it counts, and so does what it left."""
        call.errors.setdefault(call.stopped_at, str(error))
        if self._arrival is None:  # refused before anything was looked at
            self.update.refit = self._report.fail(call.errors.values(), call.scope)
            if self._report.log.current is None:  # else it was another client's, who goes on
                self._audit.drop_halves()
            return
        self._derived.refresh(call.touched)
        sent = () if isinstance(self._arrival, Stream) else self._arrival.bucket.names
        self._audit.stopped(call, sent)
        self._close(call)

    def _close(self, call: Call) -> None:
        self._report.end_call(self._arrived(call), call.errors, call.scope)
        if call.errors:
            self._audit.drop_halves()

    def _count(self, call: Call) -> int:
        """Tensors that were sent."""
        match self._arrival:
            case KnownBucket(recipe=recipe):
                return recipe.size
            case NewBucket(bucket=bucket):
                return len(bucket.names)
        return len(call.sources.names)

    def _arrived(self, call: Call) -> Arrived:
        wants_layout = self._report.refit.wants_layout
        has_taken = bool(call.touched)
        match self._arrival:
            case KnownBucket(recipe=recipe):
                return Arrived(
                    recipe.numbers,
                    recipe.nbytes,
                    has_taken or recipe.is_taken,
                    layout=recipe.layout_number,
                )
            case NewBucket(bucket=bucket):
                names, nbytes = bucket.names, bucket.nbytes
                layout = bucket.layout_number if wants_layout else 0
            case _:
                names, nbytes, layout = call.sources.names, call.sources.nbytes, 0
        numbers = self._report.brought.numbers_of(names)
        return Arrived(numbers, nbytes, has_taken, call.touched, layout)


def outside_of_a_call(name: str) -> RefitError:
    """A write that belongs to no update."""
    return RefitError(
        name,
        "a weight_loader called outside model.load_weights",
        "every write has to belong to an update, or its scale could be left behind",
        "Send the tensor through model.load_weights or an update_weights_from_* call.",
    )
