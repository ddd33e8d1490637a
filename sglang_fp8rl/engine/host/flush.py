"""The caches that old weights filled: emptied on every rank alike, those in HiCache's storage too."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable
from typing import Any

from sglang.srt.managers.mm_utils import init_mm_embedding_cache
from sglang.srt.managers.scheduler_components.flush_wrapper import SchedulerFlushWrapper

from ...errors import HostError
from ..refit import refit_of
from .boundary import Boundary


class RefitFlushWrapper(SchedulerFlushWrapper):
    """A flush that waits for an idle server is done, or given up, by all ranks at once: each has its own clock."""

    _pending: tuple[Any, float] | None

    def __init__(self, *, flush_cache: Callable[..., bool], **others: Any) -> None:
        self._scheduler: Any = getattr(flush_cache, "__self__", None)
        is_idle = others.pop("is_fully_idle")
        super().__init__(
            flush_cache=flush_cache,
            is_fully_idle=lambda: _on_every_rank(self._scheduler, is_idle()),
            **others,
        )

    def check_pending(self) -> None:
        if self._pending is None:
            return
        request, deadline = self._pending
        may_wait = _on_every_rank(self._scheduler, time.monotonic() < deadline)
        self._pending = request, math.inf if may_wait else -math.inf
        super().check_pending()
        if self._pending is not None:
            self._pending = request, deadline


def _on_every_rank(scheduler: Any, holds: bool) -> bool:
    """Whether it holds on every rank of a model that is served by this method. A collective."""
    if refit_of(scheduler.tp_worker.model_runner.model) is None:
        return holds
    return Boundary(scheduler.weight_updater.tp_cpu_group).on_every_rank(holds)


def forget_embeddings() -> None:
    """Drop what the towers made of the images (or sounds) of older requests. SGLang keeps it by image, whatever the weights
    are, and no flush reaches it."""
    cache = sys.modules[init_mm_embedding_cache.__module__].embedding_cache
    if cache is not None:
        cache.clear()


def clear_stored_cache(manager: Any) -> None:
    """Clear what HiCache's storage backend or LMCache keeps: no flush reaches it, and it is of the old weights. Raises
    `HostError` where it can't be cleared."""
    scheduler = manager.scheduler
    kinds = ("enable_hicache_storage", "enable_lmcache")
    is_stored = any(getattr(scheduler, kind, False) for kind in kinds)
    if is_stored and not scheduler.tree_cache.clear_storage_backend():
        raise HostError(
            "the KV cache's storage backend",
            "not cleared, or unable to",
            "it keeps what the old weights computed, and prompts would go on with that",
            "Detach it, or use one that can be cleared; then send the update again.",
        )
