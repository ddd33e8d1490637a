"""Fingerprints, and the cast and back to BF16, beside a copy of the same memory, in one process.

    python benchmarks/bench_fingerprint.py                # on a CPU, one thread and all
    python benchmarks/bench_fingerprint.py --device cuda --json FILE

The number is compared with the definition in torch first, and `through_fp8` with the reference; if one differs, it says so and exits 1,
without a number of its own. Runs are interleaved; GB/s of bytes read (of a copy and of the cast and back: read, not
written), median with p10 and p90.

- *fingerprint*: of one tensor, *experts*: of the same memory as matrices of 768 rows, each with a number of its own.
  Both with the wait, and all of the host's part.
- *verify*: what `update(verify=True)` adds in the trainer: the cast of BF16, and the number of its codes and scales.
- *through*: `through_fp8` of BF16, blocks of 128×128.

Behind these on a GPU, *gpu*: the same by the GPU's clock, without the host's part; and for whole models in FP8, codes and
scales, the seconds of all their numbers from tables that are laid out (once), and of the laying out.
"""

from __future__ import annotations

import functools
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import measured
import torch
import typer
from bench_gpu import Clock, conditions
from shapes import MODELS

from sglang_fp8rl.formats.format import BlockGrid
from sglang_fp8rl.numerics import cast_into, through_fp8
from sglang_fp8rl.numerics.fingerprint import (
    NumberTable,
    _column_keys,
    by_torch,
    scaled_boxes,
    seed_of,
    tensor_number,
    whole,
)

SEED = seed_of("benchmark")
WHOLE = ("Qwen3-8B", "Qwen3-30B-A3B")


def main(
    mib: Annotated[int, typer.Option(help="Size of the tensor.")] = 256,
    device: str = "cpu",
    runs: int = 9,
    json_path: Annotated[Path | None, typer.Option("--json", help="append JSON lines")] = None,
) -> None:
    """One JSON line for each dtype and number of threads."""
    generator = torch.Generator().manual_seed(0)
    data = torch.randint(0, 256, (mib << 8, 4096), dtype=torch.uint8, generator=generator)
    data = data.to(device)
    other = torch.empty_like(data)
    weight = torch.randn(mib << 8, 2048, generator=generator).to(device, torch.bfloat16)
    sample, part = data[:64], weight[:200, :1000]
    # The definition by bytes, on a CPU; what is timed reads words.
    number = by_torch(sample.cpu(), 0, 0, SEED, _column_keys(4096))
    for dtype in (torch.uint8, torch.float8_e4m3fn, torch.bfloat16):
        if tensor_number(sample.view(dtype), SEED) != number:
            raise SystemExit(f"{dtype}: another number than the definition's")
    expected = through_fp8(part.cpu(), (128, 128), backend="reference")
    if not torch.equal(through_fp8(part, (128, 128)).cpu(), expected):
        raise SystemExit("through_fp8: other values than the reference's")
    rows = []
    for threads in (1, torch.get_num_threads()) if device == "cpu" else (1,):
        torch.set_num_threads(threads)
        tasks: dict[str, Callable[[], object]]
        for dtype in (torch.float8_e4m3fn, torch.bfloat16):
            tensor = data.view(dtype)
            experts = [[whole(one, SEED)] for one in tensor.split(768)]
            tasks = {
                "fingerprint": functools.partial(tensor_number, tensor, SEED),
                "experts": lambda experts=experts: NumberTable(experts).numbers(),  # type: ignore[misc]
                "copy": functools.partial(other.copy_, data),
            }
            row = _row(tasks, data.nbytes, device, runs, threads, str(dtype))
            laid_out = {
                "fingerprint": NumberTable([[whole(tensor, SEED)]]).start,
                "experts": NumberTable(experts).start,
                "copy": tasks["copy"],
            }
            rows.append(row | _on_gpu(laid_out, data.nbytes, device, runs))
        copy = torch.empty_like(weight)
        tasks = {
            "verify": functools.partial(_verified, weight),
            "through": functools.partial(through_fp8, weight, (128, 128)),
            "copy": functools.partial(copy.copy_, weight),
        }
        row = _row(tasks, weight.nbytes, device, runs, threads, "cast of torch.bfloat16")
        del tasks["verify"]
        rows.append(row | _on_gpu(tasks, weight.nbytes, device, runs))
    if device != "cpu":
        del tasks, laid_out, experts, tensor, data, other, weight, copy
        rows += [_whole_model(name, torch.device(device), runs) for name in WHOLE]
    for row in rows:
        print(json.dumps(row))
    where = torch.device(device)
    measured.append(json_path, rows, **(conditions(where) if where.type == "cuda" else {}))


def _verified(weight: torch.Tensor) -> int:
    codes = torch.empty(weight.shape, dtype=torch.float8_e4m3fn, device=weight.device)
    scales = weight.new_empty(
        BlockGrid.of(weight.shape, (128, 128)).scale_shape, dtype=torch.float32
    )
    cast_into(weight, codes, scales, (128, 128))
    return NumberTable(
        [scaled_boxes("w", codes, [scales], tuple(weight.shape), (0, 0), (128, 128))]
    ).numbers()[0]


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


def _on_gpu(
    tasks: dict[str, Callable[[], object]], nbytes: int, device: str, runs: int
) -> dict[str, object]:
    """GB/s by the GPU's clock of tasks that do not wait; nothing on a CPU."""
    if device == "cpu":
        return {}
    found = Clock(torch.device(device)).interleaved(tasks, runs)
    return {
        f"{name}_gpu_gb_s": round(nbytes / measured.spread(seconds)["median_s"] / 1e9, 2)
        for name, seconds in found.items()
    }


def _whole_model(name: str, device: torch.device, runs: int) -> dict[str, object]:
    """Of every weight of a model a number; the first is compared with the definition on a CPU."""
    of = []
    for what, rows, columns, count in MODELS[name].weights():
        grid = BlockGrid.of((rows, columns), (128, 128))
        codes = torch.empty((count, rows, columns), dtype=torch.uint8, device=device).random_()
        scales = torch.rand((count, *grid.scale_shape), device=device)
        for at in range(count):
            weight = codes[at].view(torch.float8_e4m3fn)
            shape, start = (rows, columns), (0, 0)
            of.append(scaled_boxes(f"{what}.{at}", weight, [scales[at]], shape, start, grid.block))
    on_cpu = [box._replace(tensor=box.tensor.cpu()) for box in of[0]]
    began = time.perf_counter()
    table = NumberTable(of)
    table.numbers()
    laid_out = time.perf_counter() - began
    if table.numbers()[0] != NumberTable([on_cpu]).numbers()[0]:
        raise SystemExit(1)
    seconds = [measured.seconds_of(table.numbers) for _ in range(runs)]
    on_gpu = Clock(device).interleaved({"numbers": table.start}, runs)["numbers"]
    return {
        "device": device.type,
        "dtype": f"{name} in FP8",
        "tensors": len(of),
        "bytes": sum(box.tensor.nbytes for boxes in of for box in boxes),
        **measured.spread(seconds),
        "gpu_median_s": measured.spread(on_gpu)["median_s"],
        "laid_out_s": laid_out,
    }


if __name__ == "__main__":
    typer.run(main)
