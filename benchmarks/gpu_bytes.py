"""The bytes of every public function of `numerics` and `trainer` on a GPU, by each backend, against the CPU's reference.

    python benchmarks/gpu_bytes.py [--json FILE]      # on a GPU; needs no pytest
    python benchmarks/gpu_bytes.py --smoke            # the CPU's kernels against its reference

A line for each function and backend. Exit status: 0 all bytes are equal; 1 some differ, or a function raised; 2 without a GPU.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import measured
import torch
import typer
from bench_gpu import conditions, device_of
from rich.console import Console
from rich.progress import Progress

# The functions and their adversarial sources are those of the tests.
sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from support.numerics.numerics_cases import bits
from support.numerics.public_calls import Calls, default_backend

BACKENDS = ("reference", "auto", "triton")


def difference(expected: Sequence[Any], found: Sequence[Any]) -> str:
    """Where two lists of results part first; empty if they do not."""
    if len(expected) != len(found):
        return f"{len(found)} results, the CPU has {len(expected)}"
    for number, (wanted, got) in enumerate(zip(expected, found, strict=True)):
        if not isinstance(wanted, torch.Tensor):
            if wanted != got:
                return f"result {number}: {str(got)[:100]}, the CPU has {str(wanted)[:100]}"
        elif wanted.shape != got.shape:
            return f"result {number}: shape {tuple(got.shape)}, the CPU has {tuple(wanted.shape)}"
        elif not torch.equal(bits(got.cpu().contiguous()), bits(wanted.contiguous())):
            return f"result {number}: other bytes"
    return ""


def compare(name: str, device: str, backend: str) -> str:
    """What is wrong with one function on a device by a backend; empty if nothing."""
    expected = list(getattr(Calls("cpu", "reference"), name)())
    try:
        with default_backend(backend):
            found = list(getattr(Calls(device, backend), name)())
    except Exception as error:  # noqa: BLE001 - it is written down, and the others are compared
        return f"{type(error).__name__}: {error} ({traceback.extract_tb(error.__traceback__)[-1].name})"
    return difference(expected, found)


def _compare(job: tuple[str, str, str]) -> str:
    return compare(*job)


def main(
    smoke: Annotated[bool, typer.Option("--smoke", help="on the CPU")] = False,
    json_path: Annotated[Path | None, typer.Option("--json", help="append JSON lines")] = None,
) -> None:
    """Compare bytes; exit 1 if any differ."""
    console = Console()
    device = device_of(console, smoke=smoke)
    names = [name for name in dir(Calls) if name.startswith("call_")]
    where: dict[str, Any] = {} if smoke else conditions(device)
    wrong = []
    pairs = [(name, backend) for backend in BACKENDS[: 2 if smoke else 3] for name in names]
    jobs = [(name, device.type, backend) for name, backend in pairs]
    # Most of the time goes to compiling, which takes a core each.
    processes = min(8, os.cpu_count() or 1)
    with (
        Progress(console=console) as progress,
        torch.multiprocessing.get_context("spawn").Pool(processes) as pool,
    ):
        texts = pool.imap(_compare, jobs)
        for (name, backend), text in progress.track(
            zip(pairs, texts, strict=True), total=len(pairs), description="comparing bytes"
        ):
            row = {"function": name.removeprefix("call_"), "backend": backend, "wrong": text}
            measured.append(None if smoke else json_path, [row], **where)
            if text:
                wrong.append(row)
    for row in wrong:
        console.print(f"{row['function']} by {row['backend']}: {row['wrong']}", markup=False)
    console.print(f"{len(pairs) - len(wrong)} of {len(pairs)} give the CPU's bytes")
    raise typer.Exit(1 if wrong else 0)


if __name__ == "__main__":
    typer.run(main)
