"""Refits in SGLang's own `/metrics` (`--enable-metrics`): a few numbers of the status section.

They are exported as SGLang exports its own: from the scheduler's process, through prometheus_client's
multi-process directory, with the labels of SGLang's scheduler metrics.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from ..extension import extensions
from ..refit import ModelRefit
from .status import status_section

PREFIX = "sglang:fp8rl_"


def observe_refit(
    manager: Any, refit: ModelRefit, call: str | None = None, success: bool = True
) -> None:
    """After a request that may have changed what is served; does nothing unless SGLang collects metrics here. Args as
    of `RefitMetrics.observe`; `manager` is SGLang's weight updater."""
    collector = manager.metrics_collector
    if collector is not None:
        metrics = _metrics(tuple(collector.labels))
        metrics.observe(collector.labels, status_section(refit), call, success)


class RefitMetrics:
    """The metrics of one process.

    Args:
        labels: names of SGLang's own scheduler labels.
        registry: of prometheus_client; its own if None.
    """

    def __init__(self, labels: tuple[str, ...], registry: Any = None) -> None:
        # SGLang sets the multi-process directory first; imported earlier, it would not be used.
        from prometheus_client import REGISTRY, Counter, Gauge

        def made(kind: Any, name: str, text: str, *more: str, **options: Any) -> Any:
            names = [*labels, *more]
            return kind(PREFIX + name, text, names, registry=registry or REGISTRY, **options)

        text = "Calls of update_weights_from_*, by source and outcome (ok or failed)."
        self._calls = made(Counter, "update_calls", text, "source", "outcome")
        self._refits = made(Counter, "refits", "Refits begun.")
        self._gauges = {
            name: made(Gauge, name, text, multiprocess_mode="mostrecent")
            for kind in extensions()
            for name, text in kind.gauges.items()
        }
        self._refit: int | None = None

    def observe(
        self, labels: dict[str, str], status: dict[str, Any], call: str | None, success: bool
    ) -> None:
        """Take over what a status has a number for, and count.

        Args:
            call: `tensor`, `distributed`, `disk` or `ipc`; None if it was no update call.
            success: of the call.
        """
        refit = status.get("last_refit")
        if call is not None:
            outcome = "ok" if success else "failed"
            self._calls.labels(**labels, source=call, outcome=outcome).inc()
            if refit is not None and refit["id"] != self._refit:
                self._refit = refit["id"]
                self._refits.labels(**labels).inc()
        for kind in extensions():
            for name, value in kind.measured(status).items():
                self._gauges[name].labels(**labels).set(value)


# prometheus_client refuses a name that is registered twice, so: one set a process.
_metrics = lru_cache(maxsize=1)(RefitMetrics)
