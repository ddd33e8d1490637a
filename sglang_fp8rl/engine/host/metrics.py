"""Refits in SGLang's own `/metrics` (`--enable-metrics`): a few numbers of the status section.

They are exported as SGLang exports its own: from the scheduler's process, through prometheus_client's
multi-process directory, with the labels of SGLang's scheduler metrics.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from ..refit import ModelRefit
from ..registered import extensions
from .status import status_section

PREFIX = "sglang:fp8rl_"


def observe_refit(
    manager: Any,
    refit: ModelRefit,
    *,
    call: str | None = None,
    success: bool = True,
) -> None:
    """After an update call, or the end of a session.

    Does nothing unless SGLang itself collects metrics in this process.

    Args:
        manager: SGLang's weight updater.
        call: `tensor`, `distributed`, `disk` or `ipc`; None at the end of a session.
        success: of the call.
    """
    collector = manager.metrics_collector
    if collector is None:
        return
    metrics = _metrics(tuple(collector.labels))
    # Extensions may run kernels and transfer: once a refit, behind its last call.
    status = status_section(
        refit, session_open=False, manager=manager if refit.report.log.is_idle else None
    )
    if call is not None:
        metrics.count(collector.labels, status, call, success)
    metrics.observe(collector.labels, status)


@lru_cache(maxsize=1)
def _metrics(labels: tuple[str, ...]) -> RefitMetrics:
    # prometheus_client refuses a name that is registered twice, so: one set a process.
    return RefitMetrics(labels)


class RefitMetrics:
    """The metrics of one process.

    Args:
        labels: names of SGLang's own scheduler labels.
    """

    def __init__(self, labels: tuple[str, ...], registry: Any = None) -> None:
        # SGLang sets the multi-process directory first; imported earlier, it would not be used.
        from prometheus_client import REGISTRY, Counter, Gauge

        registry = registry or REGISTRY

        def gauge(name: str, text: str, *more: str) -> Any:
            return Gauge(
                PREFIX + name,
                text,
                labelnames=[*labels, *more],
                multiprocess_mode="mostrecent",
                registry=registry,
            )

        self.calls = Counter(
            f"{PREFIX}update_calls",
            "Calls of update_weights_from_*, by source and outcome (ok or failed).",
            labelnames=[*labels, "source", "outcome"],
            registry=registry,
        )
        self.refits = Counter(
            f"{PREFIX}refits", "Refits begun.", labelnames=labels, registry=registry
        )
        self.seconds = gauge("refit_seconds", "Time of the last refit, in load_weights.")
        self.nbytes = gauge("refit_bytes", "Bytes that the last refit was sent.")
        self.consistent = gauge("consistent", "1 if the served weights are of one piece, else 0.")
        self.replayed = gauge(
            "replayed_share", "Share of all update calls so far that were replayed."
        )
        self.sqnr = gauge("sqnr_db", "SQNR of the last refit's samples, in dB.", "scheme")
        self.more = {
            name: gauge(name, text) for kind in extensions() for name, text in kind.gauges.items()
        }
        self._refit: int | None = None

    def count(
        self, labels: dict[str, str], status: dict[str, Any], source: str, success: bool
    ) -> None:
        """One update call more, and one refit more if it is the first of one."""
        outcome = "ok" if success else "failed"
        self.calls.labels(**labels, source=source, outcome=outcome).inc()
        refit = status["last_refit"]
        if refit is not None and refit["id"] != self._refit:
            self._refit = refit["id"]
            self.refits.labels(**labels).inc()

    def observe(self, labels: dict[str, str], status: dict[str, Any]) -> None:
        """Take over what the status section says."""
        self.consistent.labels(**labels).set(int(status["consistent"]))
        replay = status["replay"]
        calls = replay["calls"] + replay["native_calls"]
        if calls:
            self.replayed.labels(**labels).set(replay["calls"] / calls)
        for kind in extensions():
            for name, value in kind.measured(status).items():
                self.more[name].labels(**labels).set(value)
        refit = status["last_refit"]
        if refit is None:
            return
        self.seconds.labels(**labels).set(refit["seconds"])
        self.nbytes.labels(**labels).set(refit["bytes"])
        for scheme, decibels in refit["sqnr_db"].items():
            if decibels is not None:
                self.sqnr.labels(**labels, scheme=scheme).set(decibels)
