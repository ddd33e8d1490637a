"""How many bytes does a refit take on the wire: FP32, BF16, quantized before transfer?

Each is sent to a CPU engine for the same weights, behind others, and bytes are checked first: every way has to
leave the same bytes in the engine, and the others have to leave other ones, or no number is printed.

    python benchmarks/bench_wire.py [--hidden 1024] [--layers 4] [--json FILE]
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

import measured
from host_log import host_log
from support.engine import commands
from support.engine.engine_host import EngineHost

from sglang_fp8rl import RefitPlan
from sglang_fp8rl.lab.testing.checkpoints import (
    make_config,
    make_state_dict,
    perturbed,
    save_checkpoint,
)
from sglang_fp8rl.trainer import quantize_for_refit

StateDict = dict[str, torch.Tensor]
WAYS = 3  # beside FP32


class Sender:
    """Sends one way after another to one engine, and asks it for its bytes."""

    def __init__(self, host: EngineHost, progress: Progress) -> None:
        self._host, self._progress = host, progress
        self._task = progress.add_task("sending", total=1 + 2 * WAYS)

    def send(self, items: list[tuple[str, torch.Tensor]]) -> tuple[int, list[dict[str, str]]]:
        """Bytes sent, and the digests of all parameters afterwards."""
        for success, message in self._host.call_all(commands.update, items):
            assert success, message
        nbytes = sum(tensor.nbytes for _, tensor in items)
        self._progress.advance(self._task)
        return nbytes, self._host.call_all(commands.digests)


def measure(sender: Sender, plan: RefitPlan, first: StateDict) -> dict[str, int]:
    """Bytes, by way."""
    nbytes, expected = sender.send(list(first.items()))
    rows: dict[str, int] = {"FP32": nbytes}
    halves = [(name, weight.to(torch.bfloat16)) for name, weight in first.items()]
    ways = {
        "BF16": halves,
        "quantized before transfer": list(quantize_for_refit(first.items(), plan)),
        # What is not FP8 may come in BF16 as well: the server holds nothing finer.
        "quantized, the rest in BF16": list(quantize_for_refit(halves, plan)),
    }
    between = list(perturbed(first, seed=1).items())
    for way, items in ways.items():
        _, others = sender.send(between)
        nbytes, found = sender.send(items)
        check(way, found, expected, others)
        rows[way] = nbytes
    return rows


def check(way: str, found: object, expected: object, others: object) -> None:
    """Digests of what a way left, of an FP32 refit's, and of what was there between them."""
    if found != expected or others == expected:
        what = "other bytes than an FP32 refit's" if found != expected else "nothing was written"
        raise SystemExit(f"{way}: {what}; no number is worth anything")


def main(
    hidden: Annotated[int, typer.Option()] = 1024,
    layers: Annotated[int, typer.Option()] = 4,
    json_path: Annotated[Path | None, typer.Option("--json", help="Append one line.")] = None,
) -> None:
    """Bytes on the wire of one full refit, by how it is sent."""
    config = make_config(
        "qwen3",
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        num_key_value_heads=max(2, hidden // 256),
    )
    first = make_state_dict(config, seed=0)
    with (
        host_log("bench-wire") as shown,
        tempfile.TemporaryDirectory() as directory,
        Progress(console=shown) as progress,
    ):
        path = save_checkpoint(Path(directory), config, first)
        with EngineHost(path) as host:
            plan = RefitPlan.from_dict(host.call(commands.plan_document))
            rows = measure(Sender(host, progress), plan, first)
    table = Table("way", "MB", "of FP32", "of BF16")
    for way, row in rows.items():
        of_fp32, of_bf16 = (row / rows[base] for base in ("FP32", "BF16"))
        table.add_row(way, f"{row / 1e6:.2f}", f"{of_fp32:.3f}", f"{of_bf16:.3f}")
    console = Console(width=None if sys.stdout.isatty() else 100)
    console.print(table)
    console.print(f"bytes served are equal; qwen3, hidden {hidden}, {layers} layers")
    record = {"benchmark": "wire", "ways": rows, "hidden": hidden, "layers": layers}
    measured.append(json_path, [record], **measured.versions("sglang", "torch"))


if __name__ == "__main__":
    typer.run(main)
