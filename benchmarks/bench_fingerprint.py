"""The fingerprint's throughput, beside a copy of the same bytes, in one process.

    python benchmarks/bench_fingerprint.py                # on a CPU, one thread and all
    python benchmarks/bench_fingerprint.py --device cuda

The number is compared with the definition in torch first; if they differ, it exits 1 without
a number of its own. Runs are interleaved; GB/s of bytes read, median with p10 and p90.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from typing import Annotated

import measured
import torch
import typer

from sglang_fp8rl.numerics.fingerprint import _column_keys, by_torch, seed_of, tensor_number

SEED = seed_of("benchmark")


def main(
    mib: Annotated[int, typer.Option(help="Size of the tensor.")] = 256,
    device: str = "cpu",
    runs: int = 9,
) -> None:
    """One JSON line for each dtype and number of threads."""
    generator = torch.Generator().manual_seed(0)
    data = torch.randint(0, 256, (mib << 8, 4096), dtype=torch.uint8, generator=generator)
    data = data.to(device)
    other = torch.empty_like(data)
    sample = data[:64]
    # The definition by bytes, on a CPU; what is timed reads words.
    if tensor_number(sample, SEED) != by_torch(sample.cpu(), 0, 0, SEED, _column_keys(4096)):
        raise SystemExit(1)
    for threads in (1, torch.get_num_threads()) if device == "cpu" else (1,):
        torch.set_num_threads(threads)
        for dtype in (torch.float8_e4m3fn, torch.bfloat16):
            tensor = data.view(dtype)
            tasks: dict[str, Callable[[], object]] = {
                "fingerprint": functools.partial(tensor_number, tensor, SEED),
                "copy": functools.partial(other.copy_, data),
            }
            print(json.dumps(_row(tasks, data.nbytes, device, runs, threads, str(dtype))))


def _row(
    tasks: dict[str, Callable[[], object]],
    nbytes: int,
    device: str,
    runs: int,
    threads: int,
    dtype: str,
) -> dict[str, object]:
    def seconds(task: Callable[[], object]) -> float:
        def finished() -> None:
            task()
            if device != "cpu":
                torch.cuda.synchronize()

        return measured.seconds_of(finished)

    row: dict[str, object] = {"device": device, "dtype": dtype, "threads": threads}
    for name, found in measured.interleaved(tasks, runs, seconds).items():
        rates = measured.spread([nbytes / one / 1e9 for one in found])
        row[f"{name}_gb_s"] = [round(rate, 2) for rate in rates.values()]
    return row


if __name__ == "__main__":
    typer.run(main)
