"""What does a full refit of a CPU engine cost, in time and memory, against SGLang's BF16 refit?

Both engines run in this one process group on the same checkpoint, receive the same FP32 tensors in
the same buckets through `update_weights_from_tensor`, and are timed alternately. Bytes come first:
after each timed refit, the FP8 engine must hold what a fresh one holds, or no number is printed.

    python benchmarks/bench_refit.py [--hidden 1024] [--layers 4] [--bucket-mb 64] [--json FILE]

Memory is the growth of the scheduler's peak resident set over its resident set before the refit
(`/proc/self/status`, VmHWM reset through `/proc/self/clear_refs`). The bucket reaches it through
shared memory, which counts in full; so the bound is one bucket, plus twice the largest tensor.
"""

from __future__ import annotations

import platform
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.progress import Progress

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

import measured
from host_log import host_log
from outcome import SLOWER
from support.engine import commands
from support.engine.engine_host import EngineHost

from sglang_fp8rl.lab.testing.checkpoints import (
    make_config,
    make_state_dict,
    perturbed,
    save_checkpoint,
)

MB = 1 << 20
MAX_TIME_RATIO = 2.0


def resident_bytes(_: Any, reset_peak: bool = False) -> tuple[int, int]:
    """(resident set, its peak) of a scheduler, in bytes."""
    return measured.resident_bytes(reset_peak=reset_peak)


def buckets_of(state: dict[str, torch.Tensor], limit: int) -> list[list[tuple[str, torch.Tensor]]]:
    """Consecutive tensors, as many as fit into `limit` bytes (always at least one)."""
    buckets: list[list[tuple[str, torch.Tensor]]] = [[]]
    size = 0
    for name, tensor in state.items():
        if buckets[-1] and size + tensor.nbytes > limit:
            buckets.append([])
            size = 0
        buckets[-1].append((name, tensor))
        size += tensor.nbytes
    return buckets


def refit(host: EngineHost, buckets: list[list[tuple[str, torch.Tensor]]]) -> tuple[float, int]:
    """Seconds inside the calls of one refit, and the peak growth of the resident set in bytes."""
    before, _ = host.call(resident_bytes, True)
    seconds = 0.0
    for at, bucket in enumerate(buckets):
        elapsed, (success, message) = host.call(
            timed_update, bucket, at == 0, at == len(buckets) - 1
        )
        assert success, message
        seconds += elapsed
    _, peak = host.call(resident_bytes)
    return seconds, max(0, peak - before)


def timed_update(
    scheduler: Any, bucket: list[tuple[str, torch.Tensor]], is_first: bool, is_last: bool
) -> Any:
    """Time the request handlers of one bucket, without our pipe: a session around all buckets if SGLang has them."""
    from sglang.srt.managers.io_struct import UpdateWeightsFromTensorReqInput
    from sglang.srt.utils import MultiprocessingSerializer

    request = UpdateWeightsFromTensorReqInput(
        serialized_named_tensors=[MultiprocessingSerializer.serialize(bucket)], flush_cache=True
    )
    updater = scheduler.weight_updater
    has_sessions = hasattr(updater, "_session")
    began = time.perf_counter()
    if has_sessions and is_first:
        commands.begin(scheduler)
    result = updater.update_weights_from_tensor(request)
    if has_sessions and is_last:
        commands.end(scheduler)
    return time.perf_counter() - began, (result.success, result.message)


def main(
    hidden: Annotated[int, typer.Option(help="hidden size; intermediate is three times it")] = 1024,
    layers: Annotated[int, typer.Option(help="decoder layers")] = 4,
    bucket_mb: Annotated[int, typer.Option(help="bucket size in MB of FP32")] = 64,
    repetitions: Annotated[int, typer.Option(help="timed refits of each engine")] = 7,
    json_path: Annotated[Path | None, typer.Option("--json", help="append a JSON line")] = None,
) -> None:
    """Compare an FP8 refit with SGLang's BF16 refit; exit 1 if bytes or memory are wrong."""
    console = Console()
    config = make_config(
        "qwen3",
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        num_key_value_heads=hidden // 128,
        vocab_size=4096,
    )
    with (
        host_log("bench-refit") as shown,
        tempfile.TemporaryDirectory() as directory,
        Progress(console=shown) as progress,
    ):
        task = progress.add_task("making weights", total=4 + 2 * repetitions)
        first = make_state_dict(config, seed=0)
        second = perturbed(first, seed=1)
        path = save_checkpoint(Path(directory) / "first", config, first)
        second_path = save_checkpoint(Path(directory) / "second", config, second)
        progress.update(task, description="starting engines", advance=1)
        with EngineHost(second_path) as fresh:
            second_digests = fresh.call(commands.digests)
        progress.advance(task)
        buckets = [buckets_of(state, bucket_mb * MB) for state in (first, second)]
        with EngineHost(path) as fp8, EngineHost(path, quantization=None) as bf16:
            engines = {"fp8": fp8, "bf16": bf16}
            expected = fp8.call(commands.digests), second_digests
            results: dict[str, list[tuple[float, int]]] = {"fp8": [], "bf16": []}

            def check(weights: int) -> None:
                if fp8.call(commands.digests) != expected[weights]:
                    shown.print("[red]bytes differ from a fresh engine's: no number[/red]")
                    raise typer.Exit(1)

            for name, engine in engines.items():
                refit(engine, buckets[1])
                progress.update(task, description=f"warming up {name}", advance=1)
            check(1)
            for repetition in range(repetitions):
                for name, engine in engines.items():
                    results[name].append(refit(engine, buckets[repetition % 2]))
                    progress.update(task, description=f"refit {name}", advance=1)
                check(repetition % 2)

    nbytes = sum(tensor.nbytes for tensor in first.values())
    largest = max(tensor.nbytes for tensor in first.values())
    bound = max(sum(t.nbytes for _, t in bucket) for bucket in buckets[0]) + 2 * largest
    seconds = {name: statistics.median(s for s, _ in rows) for name, rows in results.items()}
    memory = {name: max(peak for _, peak in rows) for name, rows in results.items()}
    ratio = seconds["fp8"] / seconds["bf16"]
    table = measured.table(
        f"Full FP32 refit, {nbytes / MB:.0f} MB in {len(buckets[0])} buckets",
        ("engine", "median s", "GB/s of FP32", "peak growth MB"),
    )
    for name in engines:
        rate = nbytes / seconds[name] / 1e9
        table.add_row(name, f"{seconds[name]:.3f}", f"{rate:.2f}", f"{memory[name] / MB:.0f}")
    console.print(table)
    console.print(
        f"time fp8 / bf16 = {ratio:.2f} (bound {MAX_TIME_RATIO}); "
        f"memory bound {bound / MB:.0f} MB (one bucket + 2 × the largest tensor)"
    )
    hosts = measured.versions("sglang", "torch")
    console.print(
        f"{hosts}, {platform.machine()}, {repetitions} alternating repetitions, hidden {hidden}, "
        f"{layers} layers"
    )
    record = {
        "benchmark": "refit",
        "bytes_fp32": nbytes,
        "buckets": len(buckets[0]),
        "seconds": seconds,
        "ratio_fp8_to_bf16": ratio,
        "peak_growth_bytes": memory,
        "peak_growth_bound_bytes": bound,
        "repetitions": repetitions,
        "hidden": hidden,
        "layers": layers,
    }
    measured.append(json_path, [record], **hosts)
    if memory["fp8"] > bound:
        console.print("[red]the peak is above its bound[/red]")
        raise typer.Exit(1)
    if ratio > MAX_TIME_RATIO:
        console.print(f"slower than {MAX_TIME_RATIO} × BF16's refit")
        raise typer.Exit(SLOWER)


if __name__ == "__main__":
    typer.run(main)
