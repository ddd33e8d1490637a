"""The census finds what is silent, and goes on whatever a class does."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import pytest
import torch
from torch import nn

pytest.importorskip("sglang")
sys.path.insert(0, str(Path(__file__).parents[3]))

from sglang_fp8rl.config import Options
from sglang_fp8rl.engine.refit import ModelRefit
from tools.census import page, results
from tools.census.configs import config_class_of, tiny_config
from tools.census.judge import judged
from tools.census.outcome import OUT_OF_TIME, Row, summary
from tools.census.tiny import shrink
from tools.census.worker import run_forked


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 6)
        self.a.requires_grad_(False)

    def load_weights(self, weights):
        from sglang.srt.model_loader.weight_utils import default_weight_loader

        parameters = dict(self.named_parameters())
        for name, tensor in weights:
            loader = getattr(parameters[name], "weight_loader", default_weight_loader)
            loader(parameters[name], tensor)


class First(Plain):
    """Keeps a number of its first load, of which torch sees nothing."""

    def load_weights(self, weights):
        weights = list(weights)
        if not hasattr(self, "first"):
            self.first = float(memoryview(weights[0][1].numpy().tobytes()).cast("f")[0])
        super().load_weights(iter(weights))


class Unseen(Plain):
    """Its first load writes memory past every operation that an observer sees."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.zeros(6), persistent=False)

    def load_weights(self, weights):
        weights = dict(weights)
        if not self.table.numpy().any():
            self.table.numpy()[:] = weights["a.bias"].numpy()
        super().load_weights(iter(weights.items()))


class Impossible(Plain):
    def __init__(self) -> None:
        raise ImportError("No module named 'of_somebody_else'")


class Builder:
    path = ""

    def __init__(self, kind: type[nn.Module]) -> None:
        self._kind = kind

    def build(self, *, is_quantized: bool = True):
        torch.manual_seed(0)
        model = self._kind()
        if not is_quantized:
            return model, None
        refit = ModelRefit(model, Options(), {}, list)
        refit.attach()
        return model, refit

    @staticmethod
    def load(model, weights):
        model.load_weights(iter(weights))


@pytest.fixture(autouse=True)
def any_algorithm():
    yield
    torch.use_deterministic_algorithms(False)


def test_copies_are_replayed_and_not_silent():
    row = judged("Plain", Builder(Plain))
    assert (row.kind, row.names, row.silent, row.reasons) == ("replayed", 2, [], [])


@pytest.mark.parametrize(("kind", "place"), [(First, ".first"), (Unseen, "table")])
def test_what_differs_from_a_fresh_load_is_silent(kind, place):
    row = judged(kind.__name__, Builder(kind))
    assert place in row.silent
    assert summary([row]).endswith("; 1 silent")


def test_with_the_observer_off_a_class_that_computes_is_silent(monkeypatch):
    from sglang_fp8rl.engine.native.observer import Observer

    class Computes(Plain):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("twice", torch.zeros(6), persistent=False)

        def load_weights(self, weights):
            weights = dict(weights)
            self.twice.copy_(weights["a.bias"]).mul_(2)
            super().load_weights(iter(weights.items()))

    assert judged("Computes", Builder(Computes)).silent == []
    monkeypatch.setattr(Observer, "leave_native", lambda *_: None)
    assert "twice" in judged("Computes", Builder(Computes)).silent


def test_a_class_that_needs_a_package_is_a_row():
    row = judged("Impossible", Builder(Impossible))
    assert row.kind == "not built"
    assert "of_somebody_else" in row.reasons[0]


def _hangs(architecture, directory):
    time.sleep(60)


def _raises(architecture, directory):
    raise ImportError("No module named 'of_somebody_else'")


def _dies(architecture, directory):
    os.kill(os.getpid(), signal.SIGSEGV)


@pytest.mark.parametrize(
    ("judge", "reason"),
    [
        (_hangs, "not done after 1 s"),
        (_raises, "ImportError: No module named 'of_somebody_else'"),
        (_dies, "ended by signal 11"),
    ],
)
def test_a_class_that_hangs_raises_or_dies_is_a_row(judge, reason):
    row = run_forked("Any", judge, limit=1 if judge is _hangs else 30)
    assert row.kind == "not built"
    assert reason in row.reasons[0]


def test_a_class_without_a_config_class_gets_a_config_all_the_same(tmp_path):
    assert config_class_of("NobodyForCausalLM", Plain) is None
    tiny_config("NobodyForCausalLM", Plain, tmp_path, ["num_experts"], [])
    assert '"num_experts": 4' in (tmp_path / "config.json").read_text()


def test_a_config_is_shrunk_with_all_of_its_parts():
    found = shrink(
        {
            "num_hidden_layers": 48,
            "layer_types": ["a"] * 47 + ["b"],
            "vision_config": {"hidden_size": 1152, "depth": 27},
            "eos_token_id": 151_643,
        }
    )
    assert found["layer_types"] == ["a", "b"]
    assert found["vision_config"] == {"hidden_size": 256, "depth": 2}
    assert found["num_hidden_layers"] == 2
    assert found["eos_token_id"] < 512


def test_an_outcome_that_is_not_on_file_is_a_change(tmp_path, monkeypatch):
    monkeypatch.setattr(results, "FOLDER", tmp_path)
    monkeypatch.setattr(page, "FOLDER", tmp_path)
    rows = [Row("A", "replayed", names=3), Row("B", "native", names=2, reasons=["x|y"])]
    path = results.write(rows)
    assert results.changed(rows) == []
    assert results.changed([Row("A", "refused"), rows[1]]) == ["A: refused, on file replayed"]
    assert results.changed([Row("C", "native")]) == ["C: native, on file nothing"]
    assert results.changed([Row("A", "not built", reasons=[f"{OUT_OF_TIME} 90 s"])]) == []
    text = page.section()
    assert results.provenance()["commit"] in text
    assert "A (3)" in text
    assert "| B (2) | x\\|y |" in text
    assert path.parent == tmp_path
