"""`make bench` runs to its end, and says then what missed a bound."""

from __future__ import annotations

import run
from typer import Typer
from typer.testing import CliRunner

app = Typer()
app.command()(run.main)


def test_what_misses_a_bound_stops_nothing_and_is_named_at_the_end(monkeypatch, tmp_path):
    (tmp_path / "misses.py").write_text("raise SystemExit(1)")
    (tmp_path / "breaks.py").write_text("raise SystemExit(7)")
    (tmp_path / "slow.py").write_text(f"raise SystemExit({run.SLOWER})")
    (tmp_path / "holds.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    monkeypatch.setattr(run, "HERE", tmp_path)
    rows = {name: (f"{name}.py",) for name in ("misses", "breaks", "slow", "holds")}
    monkeypatch.setattr(run, "BENCHMARKS", rows)
    result = CliRunner().invoke(app)
    assert result.exit_code == 1
    assert (tmp_path / "ran").exists()
    assert "Not as it should be: misses, breaks" in result.output
    assert "exit status 7" in result.output
    assert "slower than wanted" in result.output


def test_a_time_decides_nothing(monkeypatch, tmp_path):
    (tmp_path / "slow.py").write_text(f"raise SystemExit({run.SLOWER})")
    monkeypatch.setattr(run, "HERE", tmp_path)
    monkeypatch.setattr(run, "GUARDS", {"slow": ("slow.py",)})
    result = CliRunner().invoke(app, ["--guard"])
    assert result.exit_code == 0
    assert "slower than wanted" in result.output


def test_every_benchmark_that_is_run_is_there():
    for script, *_ in (*run.BENCHMARKS.values(), *run.GUARDS.values()):
        assert (run.HERE / script).exists()
