"""Opens and closes the calls of a model: what each left out is found, and extensions are told."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from ...config import Options
from ...errors import Fp8RlError, RefitError, listed
from ...formats import weight_name_of
from ..arrival.update import Origin, Update
from ..extension import Extension
from ..ledger.ledger import Ledger
from ..model.derived_weights import DerivedWeights
from .call import Call
from .checks import foreign_error, not_finite_errors
from .pairs import PairTable
from .recording import APART
from .untaken import UntakenNames

NOTHING_SENT = RefitError(
    "an update",
    "an empty list of tensors",
    "an update names at least one; a rank alone may be sent none, as it may have none of a bucket's experts",
    "Check what the trainer's iterator yields.",
)


class Calls:
    """The calls of a model.

    Args:
        derived: renewed where an error ended a call.
        extensions: are told of every call, and may take what no parameter takes.

    Attributes:
        update: the request that is being served; the load at startup where there is none.
        running: the call that runs now.
        untaken: what no parameter took.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        options: Options,
        pairs: PairTable,
        ledger: Ledger,
        derived: DerivedWeights,
        extensions: Sequence[Extension],
    ) -> None:
        self._pairs, self._ledger, self._derived = pairs, ledger, derived
        self._extensions = extensions
        self.untaken = UntakenNames(model, options, ledger.names, extensions)
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
    def arriving(self) -> Iterator[None]:
        """What is raised in here refuses the call, of which nothing was looked at."""
        self.update.calls += 1
        try:
            yield
        except Exception as error:
            told = self._told(error, "")
            for extension in self._extensions:
                extension.refused(self.update, told)
            if told is error:
                raise
            raise told from error

    def begin(self, call: Call) -> None:
        self._ledger.stamp += 1
        for extension in self._extensions:
            extension.begin(call)

    @contextmanager
    def open(self, call: Call) -> Iterator[None]:
        """One call that has begun: what it left out is found, also where an error stopped it.

        Raises:
            RefitError: something that was sent was not stored; names all of it.
        """
        self.running = call
        try:
            with torch.no_grad():
                yield
        except Exception as error:
            told = self._stop(call, error)
            if told is error:
                raise
            raise told from error
        else:
            self._finish(call)
            if call.errors:
                raise call.error
        finally:
            self.running = None
            call.sources.forget_tensors()

    def _told(self, error: Exception, name: str) -> Fp8RlError:
        """The error to tell the client; `name` went by last."""
        if isinstance(error, Fp8RlError):
            return error
        return foreign_error(name, error, self._ledger.names.known)

    def _finish(self, call: Call) -> None:
        """A call came to its end: NaN, unknown names, open halves."""
        call.errors.update(not_finite_errors(call.not_finite))
        call.errors |= dict(call.raised.values())
        self.untaken.settle(call)
        if call.update.keeps_halves and not call.errors:
            if self._pairs.detach():
                call.sources.leave_native((), APART)
        else:
            call.errors.update(self._pairs.give_up())
        if not call.size and not call.update.origin.is_serving:  # of an update all ranks say it
            call.errors[""] = str(NOTHING_SENT)
        self._close(call)

    def _stop(self, call: Call, error: Exception) -> Fp8RlError:
        """An error ended the call: what was found before it counts, and so does what never had its turn.

        Returns the error to tell the client.
        """
        told = self._told(error, call.sources.latest_name)
        call.errors |= dict(call.raised.values())
        _add(call, told)
        try:
            self._derived.refresh(call.sources.consumed)
        except Exception as another:  # noqa: BLE001 it is raised with the first, which it may be
            _add(call, self._told(another, call.sources.latest_name))
        call.errors = {**not_finite_errors(call.not_finite), **call.errors}
        for name, text in self._pairs.give_up().items():
            call.errors.setdefault(name, text)
        sent = () if call.bucket is None else call.bucket.names
        left = [
            name
            for name in sent
            if weight_name_of(name) not in self._ledger.names.unused
            and name not in call.sources.consumed
            and name not in call.errors
        ]
        if left:
            text = f"{listed(left)}: not reached, an error ended the call before; send again"
            call.errors.update(dict.fromkeys(left, text))
        self._close(call)
        return told if list(call.errors.values()) == [str(told)] else call.error

    def _close(self, call: Call) -> None:
        call.update.tensors += call.size
        for extension in self._extensions:
            extension.closed(call)


def _add(call: Call, told: Fp8RlError) -> None:
    """One more thing that went wrong in a call, which may have been said."""
    if str(told) not in call.errors.values():
        before = filter(None, [call.errors.get(told.subject)])
        call.errors[told.subject] = " | ".join([*before, str(told)])
