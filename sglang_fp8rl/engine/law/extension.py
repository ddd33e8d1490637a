"""The law as a part of a server that can be left out: without it updates are answered, and nothing is said of refits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from ..host.update_request import are_weights_released
from .law import Law
from .refit_end import RefitEnd, end_by_flush
from .status import badness, section


class LawOfServer(Law):
    """What the law does behind updates and beside them."""

    request_end = RefitEnd
    gauges: ClassVar = {
        "refit_seconds": "Time of the last refit, in load_weights.",
        "refit_bytes": "Bytes that the last refit was sent.",
        "consistent": "1 if the served weights are of one piece, else 0.",
    }
    badness = staticmethod(badness)

    def cache_is_empty(self, manager: Any) -> bool:
        """A refit without session or name ends here."""
        return are_weights_released(manager) or end_by_flush(self, manager)

    def add_to_status(self, status: dict[str, Any]) -> None:
        found = section(self)
        status |= found | {"problems": [*found["problems"], *status["problems"]]}

    @staticmethod
    def measured(status: Mapping[str, Any]) -> Mapping[str, float]:
        found, refit = {"consistent": int(status["consistent"])}, status["last_refit"]
        if refit is not None:
            found |= {"refit_seconds": refit["seconds"], "refit_bytes": refit["bytes"]}
        return found
