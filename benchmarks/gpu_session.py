"""All that needs a GPU, in three calls of at most six minutes each; needs nothing beyond the offline bundle.

    python benchmarks/gpu_session.py laws      # bytes, kernels' times, then pairs of servers
    python benchmarks/gpu_session.py speed     # an 8B model: refit, decode
    python benchmarks/gpu_session.py large     # a large MoE: refit; its first one alone takes 15 s

Each part is a process of its own with a share of the time, writes its results as they come, and may fail: the others run.
Exit status: 0; 1 if a part failed, ran out of its time or was not started; 2 without a GPU.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Annotated

import measured
import typer
from bench_gpu import device_of
from rich.console import Console

HERE = Path(__file__).parent
RESULTS = HERE / "results"
TOTAL_S = 345.0  # of one call; a started part has its own limit
# What DeepGEMM would compile for every M is not waited for, in servers and out of them.
ENVIRONMENT = {"SGLANG_JIT_DEEPGEMM_PRECOMPILE": "0", "PYTHONUNBUFFERED": "1"}


@dataclass(frozen=True)
class Part:
    """A benchmark with its arguments.

    Attributes:
        seconds: that it may take at most.
        json: the results file; None where it writes none.
    """

    script: str
    args: tuple[str, ...] = ()
    seconds: float = 60
    json: str | None = None

    def command(self) -> list[str]:
        more = [] if self.json is None else ["--json", str(RESULTS / self.json)]
        return [sys.executable, str(HERE / self.script), *self.args, *more]


PARTS = {
    "laws": (
        Part("gpu_bytes.py", (), 90, "bytes_gpu.jsonl"),
        Part("bench_gpu_pairs.py", (), 230, "servers_gpu.jsonl"),
        Part("bench_gpu.py", ("--repetitions", "20"), 60, "cast_gpu.jsonl"),
        Part("bench_fingerprint.py", ("--device", "cuda"), 40, "fingerprint_gpu.jsonl"),
        Part("bench_linear_gpu.py", ("--repetitions", "10"), 120, "linear_gpu.jsonl"),
    ),
    "speed": (
        Part(
            "bench_gpu_server.py",
            (
                # Starts take two minutes on a fresh machine, and decoding as long.
                *("--model", "qwen3-8b", "--budget-s", "310", "--max-batch", "64"),
                *("--only", "BF16 activations", "--only", "bf16", "--only", "sglang_fp8rl"),
                *("--decode-repetitions", "2", "--repetitions", "5", "--output-tokens", "64"),
            ),
            325,
            "server_gpu.jsonl",
        ),
    ),
    "large": (
        Part(
            "bench_gpu_server.py",
            (
                *("--model", "qwen3-30b-a3b", "--budget-s", "320", "--max-batch", "1"),
                *("--only", "sglang_fp8rl", "--only", "bf16"),
                *("--decode-repetitions", "0", "--repetitions", "5"),
                *("--server-arg", "--disable-cuda-graph"),
            ),
            335,
            "server_gpu.jsonl",
        ),
    ),
}
Call = Enum("Call", {name: name for name in PARTS}, type=str)  # type: ignore[misc]


def main(
    call: Annotated[Call, typer.Argument(help="which of them")],
    total_s: Annotated[float, typer.Option(min=1, help="no part starts behind this")] = TOTAL_S,
) -> None:
    """Run one of the calls of a session on a GPU."""
    console = Console()
    device_of(console, smoke=False)
    raise typer.Exit(0 if all_are_ok(call.value, total_s, console) else 1)


def all_are_ok(call: str, total_s: float, console: Console) -> bool:
    """Whether every part of a call ran to its end; says how each ended."""
    began = time.monotonic()
    table = measured.table(f"session: {call}", ("part", "how it ended", "seconds"), words=2)
    ended = []
    for part in PARTS[call]:
        left = total_s - (time.monotonic() - began)
        if left < part.seconds / 4:
            ended.append(f"not started: {left:.0f} s were left")
            table.add_row(part.script, ended[-1], "")
            continue
        console.rule(" ".join((part.script, *part.args)))
        started = time.monotonic()
        ended.append(run(part, min(part.seconds, left)))
        table.add_row(part.script, ended[-1], f"{time.monotonic() - started:.0f}")
    console.print(table)
    return all(how == "ok" for how in ended)


def run(part: Part, seconds: float) -> str:
    """How a part ended, in words. It is told to stop first (it ends its servers then), and killed 15 s later."""
    child = subprocess.Popen(part.command(), env={**os.environ, **ENVIRONMENT}, cwd=HERE.parent)
    try:
        status = child.wait(seconds)
    except subprocess.TimeoutExpired:
        child.terminate()
        try:
            child.wait(15)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
        return f"stopped after {seconds:.0f} s"
    return "ok" if status == 0 else f"exit status {status}"


if __name__ == "__main__":
    typer.run(main)
