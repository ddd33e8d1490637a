"""G6-G8, G11, G12: refit and decode of real SGLang servers on one GPU: ours, SGLang's FP8, BF16.

    python benchmarks/bench_gpu_server.py --model qwen3-8b [--json FILE]   # most important first
    python benchmarks/bench_gpu_server.py --smoke                          # tiny, on the CPU

Servers start with dummy weights of a real configuration and are refitted before anything is timed.
There is no number of a server whose gate fails: our status has to say that every tensor arrived and
all is of one piece, outputs have to change with the weights, and the two FP8 servers, of which one
quantizes itself and the other is sent pairs, have to give the same greedy tokens. Numbers are written
as they come; a server whose tokens differ behind them ends the run, and says so.
"""

from __future__ import annotations

import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Sequence
from enum import Enum
from importlib import metadata
from pathlib import Path
from types import FrameType
from typing import Annotated, Any

import requests
import typer
from bench_gpu import conditions, device_of
from gpu_server import decode, graphs, refit
from gpu_server.budget import Budget
from gpu_server.models import REAL, TINY, Layout, Model, Values
from gpu_server.report import Report, against_targets
from gpu_server.servers import (
    ENVIRONMENT,
    MODES,
    NATIVE,
    OURS,
    Mode,
    Served,
    Setting,
    groups_of,
    serving,
)
from rich.console import Console
from rich.markup import escape
from rich.progress import Progress

from sglang_fp8rl.errors import Fp8RlError, HostError

ModeName = Enum("ModeName", {mode.what: mode.what for mode in MODES}, type=str)  # type: ignore[misc]
ModelName = Enum("ModelName", {name: name for name in REAL}, type=str)  # type: ignore[misc]
REFIT_COLUMNS = (
    "id", "what", "median_s", "p10_s", "p90_s", "server_median_s", "first_load_s", "request_floor_s",
    "buckets",
)  # fmt: skip
DECODE_COLUMNS = ("id", "what", "batch", "tokens_per_s", "slowest_tokens_per_s")
GRAPH_COLUMNS = ("id", "what", "captures_before", "captures_after", "answers_equal_to_fresh")
START_S = {"cuda": 90.0, "cpu": 30.0}  # a first guess; then what the slowest start took


class Run:
    """One run of everything, in the order of importance."""

    def __init__(
        self, model: Model, setting: Setting, budget: Budget, report: Report, progress: Progress
    ) -> None:
        self.model, self.setting, self.budget, self.report = model, setting, budget, report
        self.progress = progress
        self.modes: Sequence[Mode] = MODES
        self.wait_for: Path | None = None
        self.layout = Layout.of(model.config())
        self.start_s = START_S[setting.device.type]
        self.samples: dict[str, refit.Samples] = {}
        self.decoded: list[dict[str, Any]] = []

    def all(self, refits: int, output_tokens: int, decodes: int) -> None:
        values = Values(self.layout, self.setting.device)
        last: dict[Mode, Served] = {}
        try:
            for modes in groups_of(self.layout, self.setting, self.modes):
                self._group(modes, values, last, refits, output_tokens, decodes)
        except (HostError, decode.DecodeError):  # what was measured before holds
            self._show(compared=OURS in last and NATIVE in last)
            raise
        self._show(compared=OURS in last and NATIVE in last)
        if self.budget.allows("G11, CUDA graphs", self.start_s):
            row = graphs.measure(self.setting, self.budget, self._bar("CUDA graphs", 2))
            self.report.add("CUDA graphs over a refit", GRAPH_COLUMNS, [row])

    def _group(
        self, modes: list[Mode], values: Values, last: dict[Mode, Served], refits: int,
        output_tokens: int, decodes: int,
    ) -> None:  # fmt: skip
        """Servers that live together: refitted in turn, then asked to decode in turn."""
        what = ", ".join(mode.what for mode in modes)
        if not self.budget.allows(f"servers of {what}", self.start_s):
            return
        others = len(modes) + 3 * (OURS in modes)  # refits with other options
        tick = self._bar(f"starting {what}", len(modes) * (1 + refits) + others)
        with serving(self.setting, self.model, modes, self.budget) as servers:
            self.start_s = max(served.server.start_seconds for served in servers)
            while self.wait_for is not None and not self.wait_for.exists():
                time.sleep(0.1)
            prepared = refit.prepare(servers, values, refits, tick)
            last |= {served.mode: served for served in servers}
            compared = OURS in last and NATIVE in last
            if compared:
                refit.compare_answers(last[OURS], last[NATIVE])
            for samples in refit.measure(servers, values, prepared, refits, self.budget, tick):
                self.samples |= samples
                rows = refit.rows_of(self.model.id, samples)
                self.report.write({**row, "compared": compared} for row in rows)
            self._decode([s for s in servers if s.mode != NATIVE], output_tokens, decodes)

    def _decode(self, servers: list[Served], output_tokens: int, repetitions: int) -> None:
        """One server after the other: SGLang's benchmark keeps to one."""
        limit = self.setting.max_batch
        if not servers or not repetitions:
            return
        tick = self._bar("decode", len(servers))
        for served in servers:
            rows = decode.measure(served, limit, output_tokens, repetitions, self.budget)
            self.report.write(rows)
            self.decoded += rows
            tick(f"decode, {served.mode.what}")

    def _show(self, compared: bool) -> None:
        if self.samples:
            rows = refit.rows_of(self.model.id, self.samples)
            self.report.show(f"full refit of {self.model.name}", REFIT_COLUMNS, rows)
            if OURS.what in self.samples:
                self.report.console.print(*against_targets(self.model.name, rows), sep="\n")
            if not compared:
                self.report.console.print("not compared with the tokens of SGLang's own FP8")
        if self.decoded:
            rows = sorted(self.decoded, key=lambda row: row["batch"])
            self.report.show(f"decode of {self.model.name}", DECODE_COLUMNS, rows)
            self.report.console.print(decode.say_crossover(rows))
            if self.report.json_path:
                self._plot(rows, self.report.json_path.parent / f"decode_{self.model.name}.png")

    def _plot(self, rows: list[dict[str, Any]], path: Path) -> None:
        try:
            decode.plot(rows, f"{self.model.name}, {self.report.conditions['gpu']}", path)
        except ImportError as error:  # matplotlib is optional; the lines are written already
            self.report.console.print(f"no plot: {error}; install matplotlib")

    def _bar(self, description: str, total: int) -> Callable[[str], None]:
        task = self.progress.add_task(description, total=total)

        def tick(what: str) -> None:
            self.progress.update(task, description=what, advance=1)

        return tick


def main(
    model: Annotated[ModelName, typer.Option(help="configuration; no download")] = "qwen3-8b",  # type: ignore
    smoke: Annotated[bool, typer.Option("--smoke", help="a tiny model on the CPU")] = False,
    repetitions: Annotated[int, typer.Option(min=2, help="timed refits of each server")] = 30,
    decode_repetitions: Annotated[int, typer.Option(min=0, help="timed runs of a batch size")] = 3,
    max_batch: Annotated[int, typer.Option(min=1, help="largest batch; a power of two")] = 256,
    output_tokens: Annotated[int, typer.Option(min=1, help="decoded by each request")] = 128,
    fp8_gemm_backend: Annotated[str, typer.Option(help="SGLang's flag (docs/gpu.md)")] = "auto",
    server_arg: Annotated[list[str] | None, typer.Option(help="more for every server")] = None,
    only: Annotated[
        list[ModeName] | None, typer.Option(help="these servers, in this order")
    ] = None,
    wait_for: Annotated[
        Path | None, typer.Option(help="a file: nothing is timed before it")
    ] = None,
    budget_s: Annotated[float, typer.Option(min=0, help="skip what does not fit")] = 480,
    json_path: Annotated[Path | None, typer.Option("--json", help="append JSON lines")] = None,
) -> None:
    """Measure real servers; exit 1 if a gate fails, 2 without a GPU."""
    console = Console()
    if smoke and json_path:
        console.print("[red]--json with --smoke: smoke numbers are no results; leave one out[/red]")
        raise typer.Exit(2)
    device = device_of(console, smoke=smoke)
    signal.signal(signal.SIGTERM, _terminate)  # so that the servers are stopped
    chosen = TINY if smoke else REAL[model.value]
    if smoke:
        repetitions, decode_repetitions, max_batch, output_tokens = 2, 3, 4, 48
        console.print("[yellow]smoke run on a CPU: its numbers are no results[/yellow]")
    where: dict[str, Any] = {} if smoke else conditions(device)
    where |= {
        "model": chosen.name,
        "sglang": metadata.version("sglang"),
        "fp8_gemm_backend": fp8_gemm_backend,
        "server_args": server_arg or [],
        "environment": ENVIRONMENT,
    }
    budget = Budget(budget_s)
    directory = Path(tempfile.mkdtemp(prefix="bench-gpu-server-"))
    with Progress(console=console) as progress:
        tokens_each = decode.PROMPT_TOKENS + 1 + output_tokens
        more = tuple(server_arg or ())
        setting = Setting(directory, device, max_batch, tokens_each, fp8_gemm_backend, more)
        run = Run(chosen, setting, budget, Report(console, json_path, where), progress)
        if only:
            run.modes = [mode for one in only for mode in MODES if mode.what == one.value]
        run.wait_for = wait_for
        groups = len(groups_of(run.layout, setting, run.modes))
        run.report.conditions = {**where, "interleaved": groups == 1}
        try:
            run.all(repetitions, output_tokens, decode_repetitions)
        except (Fp8RlError, requests.RequestException) as error:
            console.print(f"[red]failed:[/red] {escape(str(error))}")
            console.print(f"the servers' logs are kept in {directory}")
            raise typer.Exit(1) from error
        finally:
            for reason in budget.skipped:
                console.print(f"skipped: {reason}")
    shutil.rmtree(directory)
    if smoke:
        ran = "some parts were skipped" if budget.skipped else "every part ran"
        console.print(f"[yellow]smoke run: {ran}; its numbers are no results[/yellow]")


def _terminate(signum: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + signum)


if __name__ == "__main__":
    typer.run(main)
