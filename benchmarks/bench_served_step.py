"""What computing with served weights costs a trainer: time and peak memory of a step beside the plain model's.

One process, one model, steps in turn: forward pass, backward pass and AdamW on one micro-batch. A step of
served weights has the same parameters, the same optimizer and other classes of modules. Before anything is
timed, the weights that are computed with are compared with the cast's, byte by byte.
"""

from __future__ import annotations

import statistics
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated, Any

import measured
import torch
import typer
from rich.console import Console
from studies.real_model.fetch import fetch

from sglang_fp8rl.lab.plan_offline import make_plan
from sglang_fp8rl.trainer.served_weights import (
    compute_as_served,
    compute_as_stored,
    fingerprint_of_served,
)
from sglang_fp8rl.wire.plan import RefitPlan

TIME_BOUND, MEMORY_BOUND = 1.25, 1.05
SEQUENCE = 256  # tokens
WAYS = ("autocast", "bfloat16", "float32")


def main(
    model: Annotated[str, typer.Option(help="a packaged model")] = "smollm2",
    way: Annotated[list[str] | None, typer.Option(help=", ".join(WAYS))] = None,
    tokens: Annotated[list[int] | None, typer.Option(help="of a micro-batch")] = None,
    steps: Annotated[int, typer.Option(min=1, help="timed, of each")] = 7,
    threads: Annotated[int, typer.Option(min=1)] = 1,
    json_path: Annotated[Path | None, typer.Option("--json", help="append a line per row")] = None,
) -> None:
    """Time steps of a trainer, plain and with served weights. Exit status 1: above a bound."""
    console = Console(width=None if Console().is_terminal else 120)
    torch.set_num_threads(threads)
    folder = fetch(model, console)
    plan = make_plan(str(folder))
    rows = []
    for one in way or WAYS[:2]:
        trained = load(folder, one)
        for count in tokens or (512, 2048):
            rows.append({"model": model, "way": one, **measure(trained, plan, one, count, steps)})
            console.print(rows[-1], highlight=False)
            conditions = {**measured.versions("torch", "transformers"), "threads": threads}
            measured.append(json_path, rows[-1:], benchmark="served_step", **conditions)
        del trained
    shown = measured.table(
        f"{model}: a step with served weights over the plain one's",
        ("parameters, products", "tokens", "plain s", "served s", "time", "peak memory"),
    )
    for row in rows:
        seconds = (f"{row['plain_s']:.2f}", f"{row['served_s']:.2f}", f"{row['time']:.3f}")
        shown.add_row(row["way"], str(row["tokens"]), *seconds, f"{row['peak_memory']:.3f}")
    console.print(shown)
    within = all(r["time"] <= TIME_BOUND and r["peak_memory"] <= MEMORY_BOUND for r in rows)
    raise typer.Exit(int(not within))


def load(folder: Path, way: str) -> Any:
    """In training mode: FP32 parameters, or BF16 ones."""
    from transformers import AutoModelForCausalLM

    dtype = torch.bfloat16 if way == "bfloat16" else torch.float32
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).train()


def measure(model: Any, plan: RefitPlan, way: str, tokens: int, steps: int) -> dict[str, Any]:
    """Medians of interleaved steps, and of the peaks of the process's resident memory."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6)
    ids = torch.arange(tokens).reshape(-1, min(tokens, SEQUENCE)) * 7 % 40_000

    def step() -> None:
        mixed = torch.autocast("cpu", torch.bfloat16) if way == "autocast" else nullcontext()
        with mixed:
            loss = model(ids, labels=ids, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    found: dict[str, list[tuple[float, float, int]]] = {"plain": [], "served": []}
    for number in range(steps + 1):  # the first of each is not counted
        for name, taken in found.items():
            if name == "served":
                compute_as_served(model, plan)
                if not number:
                    fingerprint_of_served(model)  # raises where other weights are computed with
            measured.resident_bytes(reset_peak=True)
            began, cpu_began = time.perf_counter(), time.process_time()
            step()
            wall_s, cpu_s = time.perf_counter() - began, time.process_time() - cpu_began
            taken.append((wall_s, cpu_s, measured.resident_bytes()[1]))
            if name == "served":
                compute_as_stored(model)
    plain, served = (list(zip(*taken[1:], strict=True)) for taken in found.values())
    wall, cpu, peak = zip(plain, served, strict=True)
    ratios = [s / p for p, s in zip(*cpu, strict=True)]
    return {
        "tokens": tokens,
        "steps": steps,
        "plain_s": statistics.median(cpu[0]),
        "served_s": statistics.median(cpu[1]),
        "time": statistics.median(ratios),
        "time_low": min(ratios),
        "time_high": max(ratios),
        "wall_time": statistics.median(wall[1]) / statistics.median(wall[0]),
        "plain_peak_bytes": statistics.median(peak[0]),
        "served_peak_bytes": statistics.median(peak[1]),
        "peak_memory": statistics.median(peak[1]) / statistics.median(peak[0]),
    }


if __name__ == "__main__":
    typer.run(main)
