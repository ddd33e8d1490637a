"""A flush that waits for an idle server ends alike on ranks whose clocks and queues differ."""

from __future__ import annotations

import itertools
import time
from types import SimpleNamespace

import pytest
from support.threads_as_ranks import Ranks

pytest.importorskip("sglang")

from sglang_fp8rl.engine.host.flush import RefitFlushWrapper

FORWARD, BACK = 60.0, -60.0  # seconds until a rank's clock says that it was long enough


class Scheduler:
    """One rank of it."""

    def __init__(self, group, *, is_served=True):
        model = SimpleNamespace(fp8rl_refit=object() if is_served else None)
        self.tp_worker = SimpleNamespace(model_runner=SimpleNamespace(model=model))
        self.weight_updater = SimpleNamespace(tp_cpu_group=group)
        self.is_idle, self.flushes, self.said = False, 0, []
        self.flush_wrapper = RefitFlushWrapper(
            flush_cache=self.flush_cache,
            is_fully_idle=lambda: self.is_idle,
            **{SENDS: self if SENDS == "ipc_channels" else self.send_output},
        )
        self.send_to_tokenizer = self  # 0.5.16

    def flush_cache(self):
        self.flushes += 1
        return True

    def send_output(self, output, _):
        self.said.append(output.success)

    def wait(self, seconds):
        self.flush_wrapper._pending = SimpleNamespace(), time.monotonic() + seconds


SENDS = next(
    name
    for name in ("send_output", "ipc_channels")
    if name in RefitFlushWrapper.__mro__[1].__init__.__annotations__
)


@pytest.mark.parametrize("idle", itertools.product((True, False), repeat=2))
@pytest.mark.parametrize("clocks", itertools.product((FORWARD, BACK), repeat=2))
def test_ranks_flush_where_all_are_idle_and_give_up_where_one_clock_is_ahead(
    monkeypatch, idle, clocks
):
    ranks = Ranks(2, monkeypatch)
    schedulers = [Scheduler(group) for group in ranks.groups]
    for scheduler, is_idle, seconds in zip(schedulers, idle, clocks, strict=True):
        scheduler.is_idle = is_idle
        scheduler.wait(seconds)
    for _ in range(2):
        ranks.call(lambda rank: schedulers[rank].flush_wrapper.check_pending())
    said = [True] if all(idle) else [False] * (BACK in clocks)
    for scheduler in schedulers:
        assert scheduler.said == said
        assert scheduler.flushes == said.count(True)
        assert (scheduler.flush_wrapper._pending is None) == bool(said)


def test_a_rank_of_another_method_asks_nobody():
    scheduler = Scheduler(None, is_served=False)
    scheduler.is_idle = True
    scheduler.wait(FORWARD)
    scheduler.flush_wrapper.check_pending()
    assert scheduler.said == [True]
