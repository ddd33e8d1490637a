"""The parts of the GPU server benchmark that need no server: no result depends on a guess in them."""

from __future__ import annotations

import json
import sys
import tempfile
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


def rows(what, batch, tokens_per_s):
    """Rows of one batch size, as the benchmark's results give them."""
    from gpu_server.decode import rows_of

    return rows_of(what, 10, [(batch, 1.0), (batch, tokens_per_s)])


def test_the_crossover_is_said_in_words():
    from gpu_server.decode import say_crossover
    from gpu_server.servers import BF16, OURS

    slow = rows(OURS.what, 1, 5.0) + rows(BF16.what, 1, 10.0)
    fast = rows(OURS.what, 8, 10.0) + rows(BF16.what, 8, 5.0)
    assert "slower than BF16 at batch 1" in say_crossover(slow)
    assert "from batch 8 on, to 8" in say_crossover(slow + fast)
    assert "no batch size in common" in say_crossover(slow[:1])


def test_the_plot_is_written(tmp_path):
    pytest.importorskip("matplotlib")
    from gpu_server.decode import plot
    from gpu_server.servers import BF16, OURS

    found = [row for what in (OURS.what, BF16.what) for b in (1, 2) for row in rows(what, b, 5.0)]
    plot(found, "title", tmp_path / "decode.png")
    assert (tmp_path / "decode.png").read_bytes().startswith(b"\x89PNG")


def test_results_of_sglang_s_benchmark_become_medians_without_the_warm_up(tmp_path):
    from gpu_server.decode import read_results, rows_of

    path = tmp_path / "results.jsonl"
    assert read_results(path) == []
    measured = [(1, 0.1), (1, 7.0), (1, 9.0), (1, 8.0), (2, 0.1), (2, 14.0)]
    lines = [{"batch_size": size, "output_throughput": rate, "x": 1} for size, rate in measured]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    one, two = rows_of("x", 16, read_results(path))
    assert (one["batch"], one["tokens_per_s"], one["slowest_tokens_per_s"]) == (1, 8.0, 7.0)
    assert (two["batch"], two["tokens_per_s"], two["repetitions"]) == (2, 14.0, 1)


def test_a_bucket_ends_before_the_tensor_that_would_pass_the_limit():
    from gpu_server.models import bucket_count

    tensors = [
        (str(n), torch.zeros(size, dtype=torch.uint8)) for n, size in enumerate((96, 64, 16))
    ]
    assert bucket_count(tensors, 160) == 2
    assert bucket_count(tensors, 176) == 1
    assert bucket_count(tensors, 48) == 3  # a larger tensor is a bucket of its own
    assert bucket_count([], 48) == 0


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


def test_a_server_that_had_to_take_another_port_is_asked_there(monkeypatch, tmp_path):
    """As one had on a GPU, where all that was to be measured was lost by it."""
    pytest.importorskip("transformers")
    from gpu_server.budget import Budget
    from gpu_server.models import TINY
    from gpu_server.servers import OURS, ServerProcess, Setting, serving

    monkeypatch.setattr(ServerProcess, "start", lambda self: self._use_port(12345))
    setting = Setting(tmp_path, torch.device("cpu"), 4, 10)
    with serving(setting, TINY, [OURS], Budget(10.0)) as (served,):
        assert served.client.url == "http://127.0.0.1:12345"


def test_results_name_no_folder_of_the_machine_that_they_are_from(tmp_path):
    import measured

    folders = (Path(tempfile.gettempdir()), Path(sys.prefix), Path.home())
    error = ", ".join(str(folder / "a" / "b.log") for folder in folders)
    measured.append(tmp_path / "found.jsonl", [{"error": error}])
    assert json.loads((tmp_path / "found.jsonl").read_text()) == {
        "error": "a/b.log, a/b.log, a/b.log"
    }
