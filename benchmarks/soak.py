"""Does a server that is refitted a thousand times, under load and with faults in between, keep anything?

    python benchmarks/soak.py [--refits 1000] [--json FILE] [--plot FILE]

A real server on the CPU platform with a tiny model. Clients generate all the time; the weights go back and
forth between two sets, in every form that trainers use (flattened, one by one, BF16, quantized by the
trainer); every so often one of the faults of docs/faults.md comes before a refit, which is then
proven by the fingerprint. After each refit the processes are looked at. Exit status 1: something grew, an
answer was lost, a fault was answered otherwise, or the weights were not what was sent.
"""

from __future__ import annotations

import json
import os
import platform
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import torch.multiprocessing
import typer
from rich.console import Console
from rich.progress import track

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

import measured
from soaking import verdict
from soaking.generating import Generators
from soaking.refitting import Refits
from soaking.resources import Sample, Watch
from support.engine.models import checkpoint
from support.server.served import HAS_SESSIONS, MODEL, QUANTIZED

from sglang_fp8rl.lab.testing.server import ServerProcess

# glibc raises these by itself and then keeps what is freed, so that resident memory creeps up in steps with
# nothing held: a server that only generates gains 13 MiB over 6,000 answers, and then no more. Fixed, what is
# freed goes back, and what grows is held.
MALLOC = {"MALLOC_MMAP_THRESHOLD_": str(128 << 10), "MALLOC_TRIM_THRESHOLD_": str(128 << 10)}
WARM_UP = 0.1  # of the refits: recipes, caches and pools fill


def main(
    refits: Annotated[int, typer.Option(help="how many")] = 1000,
    clients: Annotated[int, typer.Option(help="that generate")] = 4,
    fault_every: Annotated[int, typer.Option(help="refits from one fault to the next")] = 5,
    seed: Annotated[int, typer.Option(help="of faults, forms and prompts")] = 0,
    json_path: Annotated[Path | None, typer.Option("--json", help="append one line")] = None,
    plot: Annotated[Path | None, typer.Option(help="PNG of all quantities")] = None,
) -> None:
    console = Console()
    with tempfile.TemporaryDirectory() as name:
        found = soak(Path(name), refits, clients, fault_every, seed, console)
    samples = found.pop("samples")
    warm_up = int(WARM_UP * len(samples))
    lines = verdict.compare(samples[warm_up:])
    verdict.show(console, lines)
    console.print_json(json.dumps(found["counts"]))
    if plot is not None:
        verdict.plot(samples, warm_up, plot)
    found["lines"] = [{**asdict(line), "is_flat": line.is_flat} for line in lines]
    found["resident"] = [sample.resident for sample in samples[:: max(1, len(samples) // 20)]]
    found["ok"] = all(line.is_flat for line in lines) and not found["lost"] and not found["wrong"]
    for problem in [*found["lost"], *found["wrong"]][:20]:
        console.print(f"[red]{problem}[/]")
    measured.append(json_path, [found])
    raise typer.Exit(0 if found["ok"] else 1)


def soak(
    directory: Path, refits: int, clients: int, fault_every: int, seed: int, console: Console
) -> dict[str, Any]:
    """Run it; what was counted, with the conditions, and the samples."""
    model = checkpoint(directory, MODEL, "first")
    environment = {"OMP_NUM_THREADS": "1", **MALLOC}
    server = ServerProcess(model, [QUANTIZED], log_path=directory / "log", env=environment)
    samples: list[Sample] = []
    with server:
        watch = Watch(server.pid)
        weights = (MODEL.first, MODEL.second)
        # Faults pickle them one by one, by which torch moves them to shared memory: all now, so that
        # what grows later is something else.
        torch.multiprocessing.set_sharing_strategy("file_system")
        for tensors in weights:
            for tensor in tensors.values():
                tensor.share_memory_()
        sender = Refits(server.url, weights, directory, HAS_SESSIONS, seed)
        began = time.monotonic()
        with Generators(server.url, MODEL.config.vocab_size, clients, seed) as generators:
            for number in track(range(refits), "refits", console=console):
                is_mending = number % fault_every == fault_every - 1
                if is_mending:
                    sender.fault()
                sender.refit(verify=is_mending)
                samples.append(watch.sample(time.monotonic() - began))
        seconds = time.monotonic() - began
    counts, answers = sender.counts, generators.counts
    return {
        "conditions": {
            **measured.versions("sglang", "torch"), "cpus": os.cpu_count(),
            "machine": platform.processor() or platform.machine(), "load": os.getloadavg(),
            "model": MODEL.name, "clients": clients, "seed": seed, "refits": refits,
        },
        "counts": {
            "seconds": round(seconds, 1), "refits": counts.refits, "proven": counts.proven,
            "cache not flushed": counts.unflushed,
            "faults": sum(counts.faults.values()), "kinds of faults": len(counts.faults),
            "answers": answers.asked, "tokens": answers.tokens, "lost answers": len(answers.lost),
            "median refit ms": round(1e3 * sorted(counts.seconds)[len(counts.seconds) // 2], 1),
        },
        "lost": answers.lost, "wrong": counts.wrong, "samples": samples,
    }  # fmt: skip


if __name__ == "__main__":
    typer.run(main)
