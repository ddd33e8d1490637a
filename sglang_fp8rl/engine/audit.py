"""The end of a call: what was sent and not stored, by name."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import torch

from ..config import Options
from .arrival.sent_tensors import weight_name_of
from .kv_scales.sent_scales import SentScales
from .model.landings import NameTable
from .model.unneeded_names import skipped_by_design
from .native.call import Call
from .native.checks import (
    homeless_scales_error,
    listed,
    not_finite_errors,
    unknown_names_error,
)
from .native.pairs import PairTable
from .report.report import RefitReport

logger = logging.getLogger(__name__)


class Audit:
    """Fills `Call.errors` with all that a call did not store.

    Args:
        names: that the model takes, and those of its checkpoint that it does not.
        pairs: FP8 halves that wait for their other half.
        learn_names: fills `names` where nothing was loaded at startup.
        sent_scales: takes those of the KV cache.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        options: Options,
        names: NameTable,
        pairs: PairTable,
        report: RefitReport,
        learn_names: Callable[[], object],
        sent_scales: SentScales,
    ) -> None:
        self._model, self._options, self._names = model, options, names
        self._pairs, self._report, self._learn_names = pairs, report, learn_names
        self._sent_scales = sent_scales

    def finish(self, call: Call, tensors: int) -> None:
        """Of a call that came to its end: NaN, unknown names, open halves, nothing at all.

        Args:
            tensors: that were sent.
        """
        call.errors.update(not_finite_errors(call.not_finite))
        passed = self._receive_scales(call)
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
            call.errors.update(self.give_up_halves())
        if not tensors:
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

    def _receive_scales(self, call: Call) -> set[str]:
        """Those of the KV cache; returns names that are no longer unknown."""
        sent = call.sources.set_aside
        if not sent or not call.scope.stores:
            return set()
        found = self._sent_scales.receive(sent, is_serving=call.scope.is_serving)
        call.errors.update(found.errors)
        call.kv_scales = found.taken
        if not call.scope.is_serving:
            return set()  # a checkpoint that has them may come again where nothing is scaled
        return {*found.taken, *found.ignored, *found.errors}

    def note_names(self, call: Call) -> None:
        """Of a probe, which stores nothing: what the model does not take may pass later."""
        self._names.not_taken(self._without_reason(call))

    def stopped(self, call: Call, sent: Sequence[str]) -> None:
        """Of a call that an error ended: what was found by then, and what never had its turn.

        Args:
            sent: all names of the call, where they are known.
        """
        call.errors = {**not_finite_errors(call.not_finite), **call.errors}
        for name, text in self.give_up_halves().items():
            call.errors.setdefault(name, text)
        taken = call.sources.consumed
        left = [name for name in sent if name not in taken and name not in call.errors]
        left = [name for name in left if name in self._report.known_names]
        if left:
            text = f"{listed(left)}: not reached, an error ended the call before; send again"
            call.errors.update(dict.fromkeys(left, text))

    @property
    def halves_wait(self) -> bool:
        """Whether halves of FP8 pairs wait for their other half."""
        return bool(self._pairs.open_halves())

    def give_up_halves(self) -> dict[str, str]:
        """Drop FP8 halves that are still waiting; returns their names and what is missing."""
        halves = self._pairs.open_halves()
        self.drop_halves()
        return {
            name: f"{text}; both halves of an FP8 weight belong into one call (or one session), "
            "and the half that came was not stored. Send them together"
            for name, text in halves.items()
        }

    def drop_halves(self) -> None:
        """Halves never outlive their refit: the other one would be of other weights."""
        self._pairs.drop()

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
