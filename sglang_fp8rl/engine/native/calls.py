"""Every call of `load_weights` is opened and closed here: what was sent and not stored is reported by name."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch

from ...config import Options
from ...errors import Fp8RlError, RefitError
from ..arrival.bucket import Bucket
from ..arrival.sent_tensors import weight_name_of
from ..arrival.update_scope import STARTUP, UpdateScope
from ..extension import Extension
from ..model.derived_weights import DerivedWeights
from ..model.landings import NameTable, skipped_by_design
from ..report.report import Arrived, RefitReport
from .call import Call, Update
from .checks import (
    foreign_error,
    homeless_scales_error,
    listed,
    not_finite_errors,
    unknown_names_error,
)
from .pairs import PairTable

logger = logging.getLogger(__name__)


class Calls:
    """Opens and closes the calls of a model; keeps what they belong to.

    Args:
        names: that the model takes, and those of its checkpoint that it does not.
        pairs: FP8 halves that wait for their other half.
        report: every call is written down there.
        derived: renewed where an error ended a call.
        learn_names: fills `names` where nothing was loaded at startup.
        extensions: may take what no parameter takes.

    Attributes:
        update: the request that is being served; the load at startup where there is none.
        running: the call that runs now.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        options: Options,
        names: NameTable,
        pairs: PairTable,
        report: RefitReport,
        derived: DerivedWeights,
        learn_names: Callable[[], object],
        extensions: Sequence[Extension],
    ) -> None:
        self._model, self._options, self._names = model, options, names
        self._pairs, self._report, self._derived = pairs, report, derived
        self._learn_names, self._extensions = learn_names, extensions
        self.update = Update(STARTUP)
        self.running: Call | None = None

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
    def one(self) -> Iterator[Call]:
        """One call: what it left out is found and written down, also where an error stopped it.

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
                told = call.error
            if told is error:
                raise
            raise told from error
        else:
            self._audit(call)
            self._close(call)
            if call.errors:
                raise call.error
        finally:
            call.sources.forget_tensors()
            self.running = None

    def expect(self, call: Call, bucket: Bucket | None, brings: Arrived | None = None) -> None:
        """The call begins: of the running refit, or of a new one.

        Args:
            bucket: None for a stream, of which nothing is known before it is read.
            brings: of a bucket that came before.
        """
        if brings is None:
            names, nbytes = ((), 0) if bucket is None else (bucket.names, bucket.nbytes)
            brings = Arrived(self._report.brought.numbers_of(names), nbytes, has_taken=False)
        since = self._report.start_call(call.scope, brings.numbers)
        self._pairs.start_call(since, self._report.log.stamp)
        call.bucket, call.brings, self.update.refit = bucket, brings, self._report.refit

    def _foreign(self, call: Call, error: Exception) -> RefitError:
        call.stopped_at = call.sources.latest_name
        return foreign_error(call.stopped_at, error, self._report.known_names)

    def _stop(self, call: Call, error: Exception) -> None:
        """An error ended the call: what was found before it counts, and so does what it left."""
        call.errors.setdefault(call.stopped_at, str(error))
        if call.brings is None:  # refused before anything was looked at
            self.update.refit = self._report.fail(call.errors.values(), call.scope)
            if self._report.log.running is None:  # else it was another client's, who goes on
                self._pairs.drop()
            return
        self._derived.refresh(call.touched)
        self._audit_stopped(call)
        self._close(call)

    def _close(self, call: Call) -> None:
        brings = call.brings
        if brings is None or call.bucket is None:  # a stream: it is known by now
            numbers = self._report.brought.numbers_of(call.sources.names)
            brings = Arrived(numbers, call.sources.nbytes, has_taken=False)
        has_taken = brings.has_taken or bool(call.touched)
        arrived = replace(brings, has_taken=has_taken, taken=call.touched)
        self._report.end_call(arrived, call.errors, call.scope)
        if call.errors:
            self._pairs.drop()

    # -- what was not stored, by name ---------------------------------------------------------------

    def _audit(self, call: Call) -> None:
        """Of a call that came to its end: NaN, unknown names, open halves, nothing at all."""
        call.errors.update(not_finite_errors(call.not_finite))
        passed = self._received(call)
        unknown = [name for name in self._unknown(call) if name not in passed]
        if call.scope.learns_names:
            # A checkpoint may hold more than the model takes: SGLang loads it, so it may pass later.
            self._names.not_taken(unknown)
        elif unknown and self._options.unknown_names == "warn":
            logger.warning("fp8rl: no parameter takes %s", listed(unknown))
        else:
            self._refuse(call, unknown)
        left = {*unknown, *call.kv_scales}
        call.unneeded = [name for name in call.sources.unused() if name not in left]
        if call.scope.keeps_halves and not call.errors:
            self._pairs.detach()
        else:
            call.errors.update(self._pairs.give_up())
        if not call.size:
            call.errors[""] = (
                "an update with an empty list of tensors; an update names at least one. "
                "Check what the trainer's iterator yields"
            )

    def _refuse(self, call: Call, unknown: list[str]) -> None:
        homeless = [name for name in unknown if name in call.sources.set_aside]
        if homeless:
            call.errors.update(dict.fromkeys(homeless, str(homeless_scales_error(homeless))))
        others = [name for name in unknown if name not in call.sources.set_aside]
        if others:
            text = str(unknown_names_error(others, self._report.known_names))
            call.errors.update(dict.fromkeys(others, text))

    def _received(self, call: Call) -> set[str]:
        """What extensions take of that which no parameter takes; returns names that are no longer unknown."""
        sent = call.sources.set_aside
        passed: set[str] = set()
        if not sent or not call.scope.stores:
            return passed
        for extension in self._extensions:
            found = extension.receive(sent, is_serving=call.scope.is_serving)
            call.errors.update(found.errors)
            call.kv_scales += found.taken
            if call.scope.is_serving:  # else it may come again where nothing is scaled
                passed |= {*found.taken, *found.ignored, *found.errors}
        return passed

    def note_names(self, call: Call) -> None:
        """Of a probe, which stores nothing: what the model does not take may pass later."""
        self._names.not_taken(self._without_reason(call))

    def _audit_stopped(self, call: Call) -> None:
        """Of a call that an error ended: what was found by then, and what never had its turn."""
        call.errors = {**not_finite_errors(call.not_finite), **call.errors}
        for name, text in self._pairs.give_up().items():
            call.errors.setdefault(name, text)
        taken = call.sources.consumed
        sent = () if call.bucket is None else call.bucket.names
        left = [name for name in sent if name not in taken and name not in call.errors]
        left = [name for name in left if name in self._report.known_names]
        if left:
            text = f"{listed(left)}: not reached, an error ended the call before; send again"
            call.errors.update(dict.fromkeys(left, text))

    def _unknown(self, call: Call) -> list[str]:
        """Names that went by and reached no parameter, without a reason. A scale has its weight's."""
        unknown = self._without_reason(call)
        if unknown and call.scope.is_serving and not self._names.is_filled:
            self._learn_names()
            unknown = self._without_reason(call)
        return unknown

    def _without_reason(self, call: Call) -> list[str]:
        return [
            name
            for name in call.sources.unused()
            if weight_name_of(name) not in self._names.unused
            and not skipped_by_design(name, self._model)
        ]
