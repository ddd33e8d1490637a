"""Benchmarks of updates print no number where an engine answers them and writes nothing."""

from __future__ import annotations

import bench_refit
import bench_replay
import bench_wire
import pytest
import torch
import typer
from outcome import SLOWER
from support.engine import commands


class Engine:
    """Holds one of two weight sets, of which each refit brings the other one, until it takes no more of them."""

    takes: int

    def __init__(self, path, **_):
        self.held, self.refits, self.replays = str(path.name), 0, 0

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def call(self, function, *args):
        if function is commands.digests:
            return self.held
        if function is bench_refit.resident_bytes:
            return 0, 0
        if function is bench_refit.timed_update:
            *_, is_last = args
            self.refits += is_last
            if is_last and self.refits <= self.takes:
                self.held = {"first": "second", "second": "first"}[self.held]
            return 1.0, (True, "")
        if function is bench_replay.plan_counts:
            return {"calls": self.replays, "recipes": 1, "native_reasons": {}}
        replays = (bench_replay.load, bench_replay.load_separate, bench_replay.host_only)
        self.replays += function in replays and self.replays < self.takes
        return 1.0


def left_by(function, **options) -> int:
    try:
        function(json_path=None, **options)
    except typer.Exit as left:
        return left.exit_code
    return 0


@pytest.mark.parametrize(("takes", "status"), [(99, 0), (0, 1), (1, 1), (3, 1)])
def test_a_refit_that_writes_nothing_is_no_number(monkeypatch, takes, status):
    monkeypatch.setattr(Engine, "takes", takes, raising=False)
    monkeypatch.setattr(bench_refit, "EngineHost", Engine)
    options = {"hidden": 128, "layers": 1, "bucket_mb": 1, "repetitions": 3}
    assert left_by(bench_refit.main, **options) == status


@pytest.mark.parametrize(("takes", "status"), [(99, SLOWER), (0, 1), (6, 1)])
def test_what_is_called_a_replay_was_one(monkeypatch, takes, status):
    monkeypatch.setattr(Engine, "takes", takes, raising=False)
    monkeypatch.setattr(bench_replay, "EngineHost", Engine)
    monkeypatch.setattr(bench_replay, "make_state_dict", lambda _: {"w": torch.zeros(1)})
    monkeypatch.setattr(bench_replay, "save_checkpoint", lambda path, *_, **__: path)
    options = {"layers": 1, "repetitions": 2, "native_repetitions": 1}
    assert left_by(bench_replay.main, **options) == status


class Progress:
    def add_task(self, *_, **__): ...

    advance = add_task


@pytest.mark.parametrize("writes", [True, False])
def test_a_way_that_writes_nothing_is_no_number(monkeypatch, writes):
    class Host:
        held = 0.0

        def call_all(self, function, items=()):
            if function is commands.digests:
                return [self.held]
            self.held = dict(items)["w"].float().sum().item() if writes else self.held
            return [(True, "")]

    monkeypatch.setattr(bench_wire, "quantize_for_refit", lambda items, _: items)
    sender = bench_wire.Sender(Host(), Progress())
    weights = {"w": torch.full((64, 64), 0.5)}
    if writes:
        assert bench_wire.measure(sender, None, weights)["FP32"] == 4 * 64 * 64
        return
    with pytest.raises(SystemExit, match="nothing was written"):
        bench_wire.measure(sender, None, weights)
