"""The veRL entry point: put this package's rollout where veRL looks for SGLang's.

`import verl` imports this module and calls nothing in it (veRL 0.9.1: `entry_point.load()`), so importing it is
what registers. veRL 0.8 has no such entry points; `VERL_USE_EXTERNAL_MODULES=sglang_fp8rl.verl_plugin` does the
same there. Both registries are read when a rollout by SGLang is wanted, so a process that only imports veRL
imports nothing of SGLang.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from typing import Any

from packaging.version import Version

from .compat import check_host, check_version, on_cpu_platform
from .config import QUANTIZATION_METHOD
from .errors import HostError
from .wire.verl_deltas import asks_for_this

logger = logging.getLogger(__name__)

OLDEST_VERL, NEWEST_VERL_EXCLUDED = Version("0.8"), Version("0.10")
TESTED_VERL = "0.9.1"
ROLLOUT = "sglang"
ADAPTER = "sglang_fp8rl.verl_rollout.adapter.ServerAdapter"


def register() -> None:
    """Register server and adapter of the rollout `sglang`. What is wrong is logged, as veRL writes what a plugin raises
    to its debug log only.

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
    registry.register(ROLLOUT, functools.partial(replica_class, verls_own, problems))
    if not problems:
        adapters[ROLLOUT, "async"] = ADAPTER


def check_verl() -> list[str]:
    """Why this veRL can't be trained with; empty if it can. Imports nothing of veRL."""
    remedy = f"pip install --no-deps verl=={TESTED_VERL}, which is tested"
    return check_version("verl", OLDEST_VERL, NEWEST_VERL_EXCLUDED, remedy)


def replica_class(load_verls_own: Callable[[], Any], problems: Sequence[str]) -> Any:
    """What veRL asks for when a rollout by SGLang is wanted. Where there are problems it is a class that refuses a
    rollout by this method and serves all others."""
    if problems:
        return _refusing(load_verls_own(), "; ".join(problems))
    # veRL's own prepares imports that its modules need. On a CPU that is SGLang's CPU engine, whose kernels
    # are not in the released wheel.
    if not on_cpu_platform():
        load_verls_own()
    from .verl_rollout.server import Replica

    return Replica


def _refusing(verls_own: Any, problems: str) -> Any:
    class Replica(verls_own):
        def __init__(self, replica_rank: int, config: Any, *args: Any, **kwargs: Any) -> None:
            if asks_for_this(config):
                raise HostError(
                    "engine_kwargs.sglang.quantization",
                    QUANTIZATION_METHOD,
                    problems,
                    "docs/verl.md says which versions go together; or serve without it.",
                )
            super().__init__(replica_rank, config, *args, **kwargs)

    return Replica


register()
