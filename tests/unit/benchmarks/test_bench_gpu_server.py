"""The parts of the GPU server benchmark that need no server: no result depends on a guess in them."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"


@pytest.fixture(autouse=True, scope="module")
def _benchmarks_on_path():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCHMARKS))
        yield
    for name in [n for n in sys.modules if n.split(".")[0] in ("gpu_server", "shapes")]:
        del sys.modules[name]


@pytest.mark.parametrize(
    ("fp8", "bf16", "expected"),
    [
        ({1: 5, 2: 9, 4: 20}, {1: 6, 2: 10, 4: 20}, 4),
        ({1: 7, 2: 9, 4: 20}, {1: 6, 2: 10, 4: 19}, 4),  # faster at 1, then slower: not from 1 on
        ({1: 6, 2: 10}, {1: 6, 2: 10}, 1),
        ({1: 7, 2: 9}, {1: 6, 2: 10}, None),
        ({1: 7, 2: 12, 4: 1}, {1: 6, 2: 10}, 1),  # 4 was measured of one only
        ({}, {}, None),
    ],
)
def test_the_crossover_is_the_batch_from_which_fp8_stays_as_fast(fp8, bf16, expected):
    from gpu_server.decode import crossover

    assert crossover(fp8, bf16) == expected


def test_the_crossover_is_said_in_words():
    from gpu_server.decode import row_of, say_crossover
    from gpu_server.servers import BF16, OURS

    slow = [row_of(OURS.what, 1, 10, [2.0]), row_of(BF16.what, 1, 10, [1.0])]
    fast = [row_of(OURS.what, 8, 10, [1.0]), row_of(BF16.what, 8, 10, [2.0])]
    assert "slower than BF16 at batch 1" in say_crossover(slow)
    assert "from batch 8 on, to 8" in say_crossover(slow + fast)
    assert "no batch size in common" in say_crossover(slow[:1])
    assert slow[0]["tokens_per_s"] == 5.0


def test_the_plot_is_written(tmp_path):
    pytest.importorskip("matplotlib")
    from gpu_server.decode import plot, row_of
    from gpu_server.servers import BF16, OURS

    rows = [row_of(what, batch, 10, [0.5]) for what in (OURS.what, BF16.what) for batch in (1, 2)]
    plot(rows, "title", tmp_path / "decode.png")
    assert (tmp_path / "decode.png").read_bytes().startswith(b"\x89PNG")


def test_a_clock_that_says_nothing_gives_no_number():
    from gpu_server.decode import ClockError, row_of

    with pytest.raises(ClockError, match=r"took -0\.1"):
        row_of("x", 1, 8, [-0.1, -0.1, 0.2])


def test_a_bucket_ends_before_the_tensor_that_would_pass_the_limit():
    from gpu_server.models import bucket_count

    tensors = [(str(n), torch.zeros(size, dtype=torch.uint8)) for n, size in enumerate((6, 4, 1))]
    assert bucket_count(tensors, 10) == 2
    assert bucket_count(tensors, 11) == 1
    assert bucket_count(tensors, 3) == 3  # a larger tensor is a bucket of its own
    assert bucket_count([], 3) == 0


def test_what_does_not_fit_into_the_budget_is_skipped_with_its_reason():
    from gpu_server.budget import Budget

    now = [100.0]
    budget = Budget(60, clock=lambda: now[0])
    assert budget.allows("first", 60)
    now[0] += 45
    assert budget.left() == 15
    assert not budget.allows("second", 16)
    now[0] += 100
    assert budget.left() == 0
    [reason] = budget.skipped
    assert "second" in reason
    assert "15 s of the budget of 60 s" in reason
    assert "--budget-s" in reason


def test_capture_lines_of_sglang_are_counted():
    from gpu_server.graphs import captures_in

    log = "Capture target decode CUDA graph begin. backend=full\nCapture target decode CUDA graph end."
    assert captures_in(log) == 1
    assert captures_in(log + "\n" + log) == 2
    assert captures_in("POST /generate") == 0


def test_the_real_configurations_have_the_published_shapes():
    pytest.importorskip("transformers")
    from gpu_server.models import REAL, Layout
    from shapes import MODELS

    layout = Layout.of(REAL["qwen3-8b"].config())
    published = MODELS["Qwen3-8B"]
    assert len(layout.quantized) == published.tensors
    assert layout.nbytes(fp8=False) - layout.nbytes(fp8=True) == published.elements
    assert layout.shapes["lm_head.weight"] == (151936, 4096)


def test_two_seeds_give_two_weight_sets_and_pairs_come_with_their_scale():
    pytest.importorskip("transformers")
    from gpu_server.models import TINY, Layout, Values

    values = Values(Layout.of(TINY.config()), torch.device("cpu"))
    name = "model.layers.0.self_attn.q_proj.weight"
    assert name in values.layout.quantized
    assert not torch.equal(values.tensor(name, 1), values.tensor(name, 2))
    assert torch.equal(values.tensor(name, 1), values.tensor(name, 1))
    names = [key for key, _ in values.pairs(1)]
    assert names[names.index(name) + 1] == f"{name}_scale_inv"
    assert len(names) == len(values.layout.shapes) + len(values.layout.quantized)


def test_what_needs_more_than_the_gpu_has_is_served_one_by_one(monkeypatch, tmp_path):
    pytest.importorskip("transformers")
    from gpu_server.models import TINY, Layout
    from gpu_server.servers import MODES, Setting, bytes_needed, groups_of

    layout = Layout.of(TINY.config())
    setting = Setting(tmp_path, torch.device("cuda"), 4, 10)
    free = [0]
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free[0], free[0]))
    free[0] = bytes_needed(layout, MODES)
    assert groups_of(layout, setting, MODES) == [[mode] for mode in MODES]
    free[0] = 2 * bytes_needed(layout, MODES)
    assert groups_of(layout, setting, MODES) == [list(MODES)]
