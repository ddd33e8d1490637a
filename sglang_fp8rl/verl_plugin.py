"""The veRL entry point: put this package's rollout where veRL looks for SGLang's.

`import verl` imports this module, in every process that does, and calls nothing in it (veRL 0.9.1:
`entry_point.load()`), so importing it is what registers. veRL 0.8 has no such entry points;
`VERL_USE_EXTERNAL_MODULES=sglang_fp8rl.verl_plugin` does the same there.

Two registries of veRL are all that is touched here. Both are read when a rollout by SGLang is
wanted, so a process that only imports veRL imports nothing of SGLang.
"""

from __future__ import annotations

import importlib.metadata
import logging
from collections.abc import Callable, Sequence
from typing import Any

from packaging.version import Version

from .compat import check_host, on_cpu_platform
from .config import QUANTIZATION_METHOD
from .errors import HostError

logger = logging.getLogger(__name__)

OLDEST_VERL, NEWEST_VERL_EXCLUDED = Version("0.8"), Version("0.10")
TESTED_VERL = "0.9.1"
ROLLOUT = "sglang"
ADAPTER = "sglang_fp8rl.verl_rollout.adapter.ServerAdapter"


def register() -> None:
    """Register server and adapter of the rollout `sglang`; idempotent.

    On a veRL or SGLang outside the supported range it says so in the log (veRL writes what a plugin
    raises to its debug log only), and a rollout that asks for this method is refused; others are
    veRL's own.

    Side effects on the host: one entry of `RolloutReplicaRegistry`, one of `_ROLLOUT_REGISTRY`.
    """
    problems = [*check_host(), *check_verl()]
    if problems:
        logger.error("fp8rl registers nothing with veRL: %s", "; ".join(problems))
    try:
        from verl.workers.rollout import base, replica

        registry = replica.RolloutReplicaRegistry
        adapters = base._ROLLOUT_REGISTRY
        verls_own = registry._registry[ROLLOUT]
    except (ImportError, AttributeError, KeyError) as error:
        logger.error(
            "fp8rl: veRL keeps its rollouts elsewhere (%s); %s is tested", error, TESTED_VERL
        )
        return
    if isinstance(verls_own, _Loader):
        return
    if problems:
        registry.register(ROLLOUT, RefusingLoader(verls_own, problems))
        return
    registry.register(ROLLOUT, ReplicaLoader(verls_own))
    adapters[ROLLOUT, "async"] = ADAPTER


def check_verl() -> list[str]:
    """Why this veRL can't be trained with; empty if it can. Imports nothing of veRL."""
    try:
        version = Version(importlib.metadata.version("verl"))
    except importlib.metadata.PackageNotFoundError:
        return ["verl is not installed; pip install --no-deps verl==" + TESTED_VERL]
    if not OLDEST_VERL <= version < NEWEST_VERL_EXCLUDED:
        return [
            f"verl {version} is outside the supported range >={OLDEST_VERL},<{NEWEST_VERL_EXCLUDED}"
            f"; {TESTED_VERL} is tested"
        ]
    return []


class _Loader:
    """What veRL calls for the replica's class, when a rollout by SGLang is wanted."""

    def __init__(self, load_verls_own: Callable[[], Any]) -> None:
        self.load_verls_own = load_verls_own


class ReplicaLoader(_Loader):
    """Loads veRL's own replica first (it prepares imports that its modules need), then ours.

    Not on the CPU platform: what veRL prepares is SGLang's CPU engine, whose kernels are not in the
    released wheel.
    """

    def __call__(self) -> Any:
        if not on_cpu_platform():
            self.load_verls_own()
        from .verl_rollout.server import Replica

        return Replica


class RefusingLoader(_Loader):
    """veRL's own replica, but for a rollout that asks for a method which can't be served here."""

    def __init__(self, load_verls_own: Callable[[], Any], problems: Sequence[str]) -> None:
        super().__init__(load_verls_own)
        self.problems = problems

    def __call__(self) -> Any:
        problems = "; ".join(self.problems)

        class Replica(self.load_verls_own()):  # type: ignore[misc]
            def __init__(self, replica_rank: int, config: Any, *args: Any, **kwargs: Any) -> None:
                asked_for = (config.get("engine_kwargs") or {}).get("sglang") or {}
                if asked_for.get("quantization") == QUANTIZATION_METHOD:
                    raise HostError(
                        "engine_kwargs.sglang.quantization",
                        QUANTIZATION_METHOD,
                        problems,
                        "docs/verl.md says which versions go together; or serve without it.",
                    )
                super().__init__(replica_rank, config, *args, **kwargs)

        return Replica


register()
