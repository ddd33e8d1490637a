"""What a class relies on beside copies of its loaders, as the method's own objects tell it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

PAST_LOADERS = "a write past its loaders into FP8 memory"
DERIVED = "derived weights"
KEPT = "kept copies"
SCALARS = "scalars that are read"
ALL = (PAST_LOADERS, DERIVED, KEPT, SCALARS)


class Reliance:
    """Watches the updates of one model, from before the first on."""

    def __init__(self, refit: Any) -> None:
        self._refit, self._past_loaders = refit, False
        native = refit._loaders.store

        def store(call: Any, target: Any, write: Any) -> None:
            self._past_loaders = self._past_loaders or target.is_fp8
            native(call, target, write)

        refit._loaders.store = store

    def found(self, native_reasons: Sequence[str]) -> list[str]:
        """Those of `ALL` that it needed."""
        derived = self._refit.derived
        needed = {
            PAST_LOADERS: self._past_loaders,
            DERIVED: any(deriver.is_used for deriver in derived._derivers),
            KEPT: bool(derived.kept_copies.copies),
            SCALARS: any("reads its value" in reason for reason in native_reasons),
        }
        return [what for what in ALL if needed[what]]
