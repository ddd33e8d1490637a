"""What was sent and not stored, by name: found at the end of every call, and written down."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence

import torch

from ...config import Options
from ...errors import Fp8RlError, RefitError, listed, near_matches
from ..arrival.sent_tensors import weight_name_of
from ..extension import Extension
from ..model.derived_weights import DerivedWeights
from ..model.landings import is_left_out
from ..report.report import Arrived, RefitReport
from .call import Call
from .pairs import PairTable

logger = logging.getLogger(__name__)


class Audit:
    """Of the calls of a model, each of which is written down in the report.

    Args:
        derived: renewed where an error ended a call.
        extensions: may take what no parameter takes.
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

    def finished(self, call: Call) -> None:
        """A call came to its end: NaN, unknown names, open halves, nothing at all."""
        call.errors.update(_not_finite_errors(call.not_finite))
        call.errors |= dict(call.raised.values())
        passed = self._received(call)
        unknown = [name for name in self._without_reason(call) if name not in passed]
        if not call.update.origin.is_serving:
            # A checkpoint may hold more than the model takes: SGLang loads it, so it may pass later.
            self._report.names.not_taken(unknown)
        elif unknown and self._options.unknown_names == "warn":
            logger.warning("fp8rl: no parameter takes %s", listed(unknown))
        else:
            self._refuse(call, unknown)
        left = {*unknown, *call.kv_scales}
        call.unneeded = [name for name in call.sources.unused() if name not in left]
        if call.update.keeps_halves and not call.errors:
            self._pairs.detach()
        else:
            call.errors.update(self._pairs.give_up())
        if not call.size:
            call.errors[""] = (
                "an update with an empty list of tensors; an update names at least one. "
                "Check what the trainer's iterator yields"
            )
        self._close(call)

    def stopped(self, call: Call, error: Exception) -> Exception:
        """An error ended the call: what was found before it counts, and so does what it left.

        Returns the error to tell the client.
        """
        told = error
        if not isinstance(error, Fp8RlError):
            call.stopped_at = call.sources.latest_name
            told = _foreign_error(call.stopped_at, error, self._report.names.known)
        call.errors |= dict(call.raised.values())
        key = told.subject if isinstance(told, Fp8RlError) else call.stopped_at
        if str(told) not in call.errors.values():
            call.errors[key] = " | ".join([*filter(None, [call.errors.get(key)]), str(told)])
        if call.brings is None:  # refused before anything was looked at
            call.update.refit = self._report.fail(call.errors.values(), call.update)
            if self._report.log.running is None:  # else it was another client's, who goes on
                self._pairs.drop()
        else:
            self._derived.refresh(call.touched)
            self._add_what_is_left(call)
            self._close(call)
        return told if list(call.errors.values()) == [str(told)] else call.error

    def _add_what_is_left(self, call: Call) -> None:
        """What was found by then, and what never had its turn."""
        call.errors = {**_not_finite_errors(call.not_finite), **call.errors}
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
        has_taken = brings.has_taken or bool(call.touched)
        arrived = brings._replace(has_taken=has_taken)
        self._report.end_call(arrived, call.errors, call.update)
        if call.errors:
            self._pairs.drop()

    def _refuse(self, call: Call, unknown: list[str]) -> None:
        homeless = [name for name in unknown if name in call.sources.set_aside]
        others = [name for name in unknown if name not in call.sources.set_aside]
        if homeless:
            call.errors |= dict.fromkeys(homeless, str(_homeless_scales_error(homeless)))
        if others:
            error = _unknown_names_error(others, self._report.names.known)
            call.errors |= dict.fromkeys(others, str(error))

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
        return [
            name
            for name in call.sources.unused()
            if weight_name_of(name) not in self._report.names.unused
            and not is_left_out(name, self._model)
        ]


def _foreign_error(name: str, error: Exception, known: Iterable[str]) -> RefitError:
    """What SGLang's `load_weights` raised by itself, behind the tensor that it was given last."""
    if isinstance(error, KeyError) and name not in known:
        return _unknown_names_error([name], known)
    return RefitError(
        name or "load_weights",
        f"{type(error).__name__}: {error}",
        "SGLang's load_weights of this model could not take it",
        "Send the tensor as the checkpoint has it.",
    )


def _unknown_names_error(unknown: list[str], known: Iterable[str]) -> RefitError:
    """`known`: names that the model takes."""
    return RefitError(
        listed(unknown),
        f"{len(unknown)} name(s) that no parameter takes",
        "every tensor sent has to land somewhere",
        near_matches(unknown[0], known)
        + "Set unknown_names='warn' in quantization_config to let them pass.",
    )


def _not_finite_errors(found: list[tuple[str, torch.Tensor]]) -> dict[str, str]:
    """One line per tensor with a NaN or Inf. Synchronizes with the device once."""
    if not found:
        return {}
    any_bad = torch.stack([bad.any() for _, bad in found]).cpu().tolist()
    lines = {}
    for (name, bad), is_bad in zip(found, any_bad, strict=True):
        if is_bad:
            count = int(bad.sum())
            first = bad.nonzero()[0].tolist()
            lines[name] = (
                f"{name}: NaN or Inf in {count} of {bad.numel()} block(s), first at {first}; "
                "a block that is not finite keeps its old bytes. Mend the weight and send it again"
            )
    return lines


def _homeless_scales_error(names: list[str]) -> RefitError:
    """Scales of a KV cache that this server has not, or of a layer that this model has not."""
    return RefitError(
        listed(names),
        f"{len(names)} scale(s) of a KV cache",
        "this server has no layer of that name whose cache is scaled",
        "Serve with --kv-cache-dtype fp8_e4m3 and kv_scales='sent' in quantization_config to use them; "
        "otherwise leave them out of the update.",
    )
