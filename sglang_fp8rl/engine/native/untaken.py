"""Names that went by in a call and reached no parameter: each has a reason, an extension that takes it, or an error."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch

from ...config import Options
from ...errors import listed
from ...formats import weight_name_of
from ..extension import Extension
from ..model.landings import NameTable, left_out, why_left_out
from .call import Call
from .checks import not_taken_errors

logger = logging.getLogger(__name__)


class UntakenNames:
    """What no parameter of a model takes.

    Args:
        extensions: may take it.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        options: Options,
        names: NameTable,
        extensions: Sequence[Extension],
    ) -> None:
        self._model, self._options = model, options
        self._names, self._extensions = names, extensions
        self._rows: tuple[int, list[dict[str, str]]] | None = None

    def settle(self, call: Call) -> None:
        """Find them behind a call; what has neither reason nor taker is one of its errors."""
        passed = self._received(call)
        unknown = [name for name in self._without_reason(call) if name not in passed]
        if not call.update.origin.is_serving:
            # A checkpoint may hold more than the model takes: SGLang loads it, so it may pass later.
            self._names.not_taken(unknown)
        elif unknown and self._options.unknown_names == "warn":
            logger.warning("fp8rl: no parameter takes %s", listed(unknown))
            call.sources.leave_native((), "it has names that no parameter takes")
        else:
            sent, known = call.sources.set_aside, self._names.known
            call.errors |= not_taken_errors(unknown, sent, known)

    def note(self, call: Call) -> None:
        """Of a probe, which stores nothing: what the model does not take may pass later."""
        self._names.not_taken(self._without_reason(call))

    def _received(self, call: Call) -> set[str]:
        """What extensions take of it; returns names that are no longer unknown."""
        sent, is_serving = call.sources.set_aside, call.update.origin.is_serving
        passed: set[str] = set()
        for extension in self._extensions if sent else ():
            found = extension.receive(sent, is_serving=is_serving)
            call.errors.update(found.errors)
            call.kv_scales += found.taken
            if is_serving:  # else it may come again where nothing is scaled
                passed |= {*found.taken, *found.ignored, *found.errors}
        return passed

    def _without_reason(self, call: Call) -> list[str]:
        """Names that went by and reached no parameter, without a reason. A scale has its weight's."""
        rows = self._left_out
        return [
            name
            for name in call.sources.unused()
            if weight_name_of(name) not in self._names.unused and not why_left_out(name, rows)
        ]

    @property
    def tied(self) -> list[dict[str, str]]:
        """The rows of names that are another tensor of the model."""
        return [row for row in self._left_out if "equals" in row]

    @property
    def _left_out(self) -> list[dict[str, str]]:
        """The rows of `left_out`, made anew where more names are known."""
        known = len(self._names.known)
        if self._rows is None or self._rows[0] != known:
            self._rows = known, left_out(self._model, self._names)
        return self._rows[1]
