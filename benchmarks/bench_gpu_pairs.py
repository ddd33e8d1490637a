"""The laws on a GPU: pairs of real servers, all at once; a refitted one equals a fresh one, and more.

    python benchmarks/bench_gpu_pairs.py [--json FILE]     # on a GPU: 22 servers, five minutes
    python benchmarks/bench_gpu_pairs.py --smoke           # one pair on the CPU

Each step is written as it ends. One that fails is written with its error, and the others go on; then the exit status is 1.
"""

from __future__ import annotations

import signal
import tempfile
import threading
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, Any

import measured
import torch
import typer
from bench_gpu import conditions, device_of
from bench_gpu_server import _terminate
from gpu_server.pairs import CONFIGURATIONS, Pair
from rich.console import Console
from rich.progress import Progress

from sglang_fp8rl.errors import Fp8RlError

_START_S = 300.0


class Journal:
    """Lines of all pairs, which run in threads."""

    def __init__(self, path: Path | None, where: dict[str, Any]) -> None:
        self.rows: list[dict[str, Any]] = []
        self._path, self._where, self._lock = path, where, threading.Lock()
        self._began = time.monotonic()

    def add(self, row: dict[str, Any]) -> None:
        with self._lock:
            self.rows.append(row)
            after = round(time.monotonic() - self._began, 1)
            measured.append(self._path, [{**row, "after_s": after}], **self._where)


def run_pair(pair: Pair, journal: Journal, progress: Progress) -> None:
    """Start both servers, do every step, stop them; what fails is a line."""
    what = {"pair": pair.configuration.name}
    task = progress.add_task(f"{what['pair']}: starting", total=None)
    with ThreadPoolExecutor(
        len(pair.servers)
    ) as pool:  # a server dies with the thread that started it
        try:
            started = [pool.submit(server.start) for server in pair.servers]
            fine = [_is_fine(journal, what | {"step": "start"}, one.result) for one in started]
            if not all(fine):
                return
            for name, step in pair.steps():
                progress.update(task, description=f"{what['pair']}: {name}")
                _is_fine(journal, what | {"step": name}, step)
        finally:
            for server in pair.servers:
                server.stop()
            progress.update(task, description=what["pair"], total=1, completed=1)


def _is_fine(journal: Journal, row: dict[str, Any], step: Any) -> bool:
    """Whether a step ran to its end; it is written down either way, and the steps behind it go on."""
    try:
        found = step()
    except Exception as error:  # noqa: BLE001
        where = traceback.extract_tb(error.__traceback__)[-1]
        kind = (
            ""
            if isinstance(error, Fp8RlError)
            else f" ({Path(where.filename).name}:{where.lineno})"
        )
        journal.add(row | {"ok": False, "error": f"{type(error).__name__}: {error}{kind}"})
        return False
    journal.add(row | {"ok": True} | (found if isinstance(found, dict) else {}))
    return True


def main(
    smoke: Annotated[bool, typer.Option("--smoke", help="one pair on the CPU")] = False,
    only: Annotated[list[str] | None, typer.Option(help="these configurations")] = None,
    json_path: Annotated[Path | None, typer.Option("--json", help="append JSON lines")] = None,
) -> None:
    """Hold real servers to the laws on a GPU; exit 1 if a step fails, 2 without a GPU."""
    console = Console()
    device = device_of(console, smoke=smoke)
    signal.signal(signal.SIGTERM, _terminate)  # so that the servers are stopped
    names = {one.name for one in CONFIGURATIONS}
    wanted = set(only or (["misaligned"] if smoke else names))
    if wanted - names:
        console.print(f"no configuration {sorted(wanted - names)}; there are {sorted(names)}")
        raise typer.Exit(2)
    if smoke:  # handles of a CPU's tensors, by SGLang's own client
        torch.multiprocessing.set_sharing_strategy("file_system")
    journal = Journal(json_path, {} if smoke else conditions(device))
    directory = Path(tempfile.mkdtemp(prefix="bench-gpu-pairs-"))
    chosen = [one for one in CONFIGURATIONS if one.name in wanted]
    pairs = [Pair(one, directory, device, _START_S) for one in chosen]
    with Progress(console=console) as progress, ThreadPoolExecutor(len(pairs)) as pool:
        for _ in pool.map(lambda pair: run_pair(pair, journal, progress), pairs):
            pass
    failed = [row for row in journal.rows if not row["ok"]]
    table = measured.table("pairs of servers", ("configuration", "held", "failed"), words=1)
    for one in chosen:
        rows = [row for row in journal.rows if row["pair"] == one.name]
        bad = [row["step"] for row in rows if not row["ok"]]
        table.add_row(one.name, str(len(rows) - len(bad)), ", ".join(bad))
    console.print(table)
    for row in failed:
        console.print(f"{row['pair']}, {row['step']}: {row['error']}", markup=False)
    if failed:
        console.print(f"the servers' logs are kept in {directory}")
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
