"""One pass through `model.load_weights`: opened and closed here, and what is known of it meanwhile."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch

from ...config import Options
from ...errors import MAX_LISTED, Fp8RlError, RefitError, listed
from ..arrival.bucket import Bucket
from ..arrival.sent_tensors import SourceIndex, weight_name_of
from ..arrival.update import Origin, Update
from ..extension import Extension
from ..model.derived_weights import DerivedWeights
from ..model.landings import Known, left_out, why_left_out
from ..report.report import Arrived, RefitReport
from .checks import foreign_error, not_finite_errors, not_taken_errors
from .observer import Observer
from .pairs import PairTable
from .recording import APART, Recording

logger = logging.getLogger(__name__)


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
        not_finite: per write, the name and a bool tensor of blocks that kept their old bytes.
        narrowed: names of what came with fewer bits than it is served with.
        kv_scales: names of scales that were read, and are to be read again when the bucket comes again.
        tied: position and the other name of tensors that are the same as others, to be looked at again as well.
        observer: of what happens besides.
        lane: what the loaders do is done in it, whichever thread they run in.
    """

    update: Update
    bucket: Bucket | None = None
    brings: Arrived | None = None
    recording: Recording | None = None
    errors: dict[str, str] = field(default_factory=dict)
    raised: dict[tuple, tuple[str, str]] = field(default_factory=dict)
    not_finite: list[tuple[str, torch.Tensor]] = field(default_factory=list)
    narrowed: dict[str, None] = field(default_factory=dict)
    kv_scales: list[str] = field(default_factory=list)
    tied: dict[int, str] = field(default_factory=dict)
    lane: Callable[[], AbstractContextManager[None]] = nullcontext
    observer: Observer = field(init=False)

    @cached_property
    def sources(self) -> SourceIndex:
        """The tensors that went by."""
        return SourceIndex(keeps_tensors=not self.update.origin.is_alone)

    @property
    def size(self) -> int:
        """Tensors that were sent."""
        if self.brings is None or self.bucket is None:  # a stream
            return len(self.sources.names)
        return len(self.brings.numbers)

    def outcome_of(self, brings: Arrived) -> Arrived:
        """What is known of it behind the call."""
        has_taken = brings.has_taken or bool(self.sources.consumed)
        return brings._replace(
            has_taken=has_taken, narrowed=brings.narrowed or tuple(self.narrowed)
        )

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
    """Opens and closes the calls of a model, each of one of the report's refits, in which it is written down.

    Args:
        derived: renewed where an error ended a call.
        extensions: may take what no parameter takes.

    Attributes:
        update: the request that is being served; the load at startup where there is none.
        running: the call that runs now.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        options: Options,
        pairs: PairTable,
        report: RefitReport,
        derived: DerivedWeights,
        extensions: Sequence[Extension],
    ) -> None:
        self._model, self._options, self._pairs = model, options, pairs
        self._report, self._derived, self._extensions = report, derived, extensions
        self.update = Update(Origin.STARTUP)
        self.running: Call | None = None
        self._rows: tuple[int, list[dict[str, str]]] | None = None

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
            told = self._stop(call, error)
            if told is error:
                raise
            raise told from error
        else:
            self._finish(call)
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

    def _finish(self, call: Call) -> None:
        """A call came to its end: NaN, unknown names, open halves, nothing at all."""
        call.errors.update(not_finite_errors(call.not_finite))
        call.errors |= dict(call.raised.values())
        passed = self._received(call)
        self._note_tied(call)
        unknown = [name for name in self._without_reason(call) if name not in passed]
        if not call.update.origin.is_serving:
            # A checkpoint may hold more than the model takes: SGLang loads it, so it may pass later.
            self._report.names.not_taken(unknown)
        elif unknown and self._options.unknown_names == "warn":
            logger.warning("fp8rl: no parameter takes %s", listed(unknown))
            call.observer.leave_native((), "it has names that no parameter takes")
        else:
            sent, known = call.sources.set_aside, self._report.names.known
            call.errors |= not_taken_errors(unknown, sent, known)
        if call.update.keeps_halves and not call.errors:
            if self._pairs.detach() and call.recording is not None:
                call.recording.refused.add(APART)
        else:
            call.errors.update(self._pairs.give_up())
        if not call.size:
            call.errors[""] = (
                "an update with an empty list of tensors; an update names at least one. "
                "Check what the trainer's iterator yields"
            )
        self._close(call)

    def _stop(self, call: Call, error: Exception) -> Fp8RlError:
        """An error ended the call: what was found before it counts, and so does what it left.

        Returns the error to tell the client.
        """
        told = error
        if not isinstance(told, Fp8RlError):
            told = foreign_error(call.sources.latest_name, error, self._report.names.known)
        call.errors |= dict(call.raised.values())
        key = told.subject
        if str(told) not in call.errors.values():
            call.errors[key] = " | ".join([*filter(None, [call.errors.get(key)]), str(told)])
        if call.brings is None:  # refused before anything was looked at
            call.update.refit = self._report.fail(call.errors.values(), call.update)
            if self._report.log.running is None:  # else it was another client's, who goes on
                self._pairs.drop()
        else:
            self._derived.refresh(call.sources.consumed)
            self._add_what_is_left(call)
            self._close(call)
        return told if list(call.errors.values()) == [str(told)] else call.error

    def _add_what_is_left(self, call: Call) -> None:
        """What was found by then, and what never had its turn."""
        call.errors = {**not_finite_errors(call.not_finite), **call.errors}
        for name, text in self._pairs.give_up().items():
            call.errors.setdefault(name, text)
        sent = () if call.bucket is None else call.bucket.names
        left = [
            name
            for name in sent
            if weight_name_of(name) not in self._report.names.unused
            and name not in call.sources.consumed
            and name not in call.errors
        ]
        if left:
            text = f"{listed(left)}: not reached, an error ended the call before; send again"
            call.errors.update(dict.fromkeys(left, text))

    def _close(self, call: Call) -> None:
        brings = call.brings
        if brings is None or call.bucket is None:  # a stream: it is known by now
            numbers = self._report.brought.numbers_of(call.sources.names)
            brings = Arrived(numbers, call.sources.nbytes, has_taken=False)
        self._report.end_call(call.outcome_of(brings), call.errors, call.update)
        if call.errors:
            self._pairs.drop()

    def _received(self, call: Call) -> set[str]:
        """What extensions take of that which no parameter takes; returns names that are no longer unknown."""
        sent, origin = call.sources.set_aside, call.update.origin
        passed: set[str] = set()
        if not sent or not origin.stores:
            return passed
        for extension in self._extensions:
            found = extension.receive(sent, is_serving=origin.is_serving)
            call.errors.update(found.errors)
            call.kv_scales += found.taken
            if origin.is_serving:  # else it may come again where nothing is scaled
                passed |= {*found.taken, *found.ignored, *found.errors}
        return passed

    def note_names(self, call: Call) -> None:
        """Of a probe, which stores nothing: what the model does not take may pass later."""
        self._report.names.not_taken(self._without_reason(call))

    def _without_reason(self, call: Call) -> list[str]:
        """Names that went by and reached no parameter, without a reason. A scale has its weight's."""
        rows = self._left_out
        return [
            name
            for name in call.sources.unused()
            if weight_name_of(name) not in self._report.names.unused
            and not why_left_out(name, rows)
        ]

    @property
    def _left_out(self) -> list[dict[str, str]]:
        """The rows of `left_out`, made anew where more names are known."""
        known = len(self._report.names.known)
        if self._rows is None or self._rows[0] != known:
            self._rows = known, left_out(self._model, self._report.names)
        return self._rows[1]

    def _note_tied(self, call: Call) -> None:
        """What a model ties to another tensor of it is not stored: it has to be the same in the end."""
        if call.bucket is None:
            return
        names = self._report.names
        rows = [row for row in self._left_out if "equals" in row]
        for one in call.sources.left() if rows else ():
            row = why_left_out(one.name, rows)
            if row:
                call.tied[one.position] = row["equals"]
        for position, other in call.tied.items():
            name, tensor = call.bucket.names[position], call.bucket.tensor(position)
            rule = f"this model ties it to {other}, and computes with that one"
            known = names.known[other]
            if tuple(tensor.shape) != known.shape:
                call.errors[name] = (
                    f"{name}: shape {tuple(tensor.shape)}; {rule}, of shape {known.shape}. Leave it out"
                )
                continue
            stamp, parts = self._report.log.stamp, _parts(tensor, known)
            self._report.sent_twice.note(name, parts, stamp, rule)


def _parts(tensor: torch.Tensor, known: Known) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """What this rank holds of a tensor that is sent like a known one, each with where it lies."""
    for landing in known.landings:
        for box, region in zip(landing.boxes, landing.regions, strict=True):
            if box is not None and region is not None:
                served = landing.target.parameter.data[region.slices]
                yield tensor[box.slices], served.reshape(box.shape)


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
