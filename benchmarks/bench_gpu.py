"""G1-G5 and G9: the cast on one GPU, against a copy of the same bytes and the competitors' kernels.

    python benchmarks/bench_gpu.py [--json FILE]          # a few minutes, most important first
    python benchmarks/bench_gpu.py --smoke                # tiny, on the CPU: is this script sound?

Bytes are compared with the plain reference before anything is timed, on every case, ragged and not
finite included; if one differs there is no number. GB/s count the *floor* bytes (source once, code
once), so an extra pass shows. Runs are interleaved. `copy` is an element-wise kernel (not a memcpy) that moves the
same number of bytes on the same device: the practical ceiling. A competitor that raises is left out, with its reason.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Annotated, Any

import measured
import torch
import typer
from rich.console import Console
from rich.progress import Progress
from shapes import MISALIGNED, MODELS

from sglang_fp8rl import numerics
from sglang_fp8rl.lab.testing.cast_tables import table_of
from sglang_fp8rl.numerics.backends import make_runner
from sglang_fp8rl.numerics.write_table import Kind, Piece

BLOCK = (128, 128)
Run = Callable[[], Any]
# About five milliseconds: longer than the host takes for any of these calls, the first of a new shape included.
_SLEEP_CYCLES = 10_000_000
# Inputs are rotated until together they are this many times the cache of the GPU.
_CACHES = 4
_DRIVER = ("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")


class Clock:
    """Times a call on a device: events on a GPU, the wall clock elsewhere.

    The GPU sleeps first, so that the host has enqueued the call by the time the first event passes:
    else a short call is the host's time, not the GPU's.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def seconds(self, run: Run) -> float:
        if self.device.type != "cuda":
            return measured.seconds_of(run)
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(_SLEEP_CYCLES)
        start.record()
        run()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1e3

    def interleaved(self, runs: dict[str, Run], repetitions: int) -> dict[str, list[float]]:
        return measured.interleaved(runs, repetitions, self.seconds)


def host_seconds(device: torch.device, run: Run, repeat: int) -> float:
    """What a call takes of the host, launch included: the GPU is idle, and nothing waits for it (median)."""
    found = []
    for _ in range(repeat):
        if device.type == "cuda":
            torch.cuda.synchronize()
        found.append(measured.seconds_of(run))
    return measured.spread(found)["median_s"]


def destination(rows: int, cols: int, block: tuple[int, int], device: torch.device) -> Any:
    codes = torch.zeros(rows, cols, dtype=torch.uint8, device=device).view(numerics.FP8_DTYPE)
    blocks = (-(-rows // block[0]), -(-cols // block[1]))
    return codes, torch.zeros(blocks, device=device)


def gate(device: torch.device) -> None:
    """Exit 1 unless single casts and the table give the reference's bytes."""
    generator = torch.Generator().manual_seed(1)
    shapes = [(1, 1), (127, 257), (576, 1368), (256, 384)]
    sources: list[torch.Tensor] = []
    pieces: list[tuple[tuple[int, int], Piece]] = []
    expected = []
    for shape in shapes:
        for dtype in (torch.float32, torch.bfloat16):
            for block in (BLOCK, (1, shape[1])):
                x = torch.randn(shape, generator=generator).to(dtype)
                x[shape[0] - 1, 0] = float("nan")
                codes, scales = destination(*shape, block, torch.device("cpu"))
                numerics.cast_into(x, codes, scales, block, backend="reference")
                expected.append((codes, scales))
                own_codes, own_scales = destination(*shape, block, device)
                sources.append(x.to(device))
                place = (len(pieces), 0)
                pieces.append((place, Piece(sources[-1], own_codes, own_scales, block, Kind.CAST)))
    runner = make_runner(table_of(pieces), device, pow2_scale=False, round_to_bf16=True)
    if runner is None:
        raise SystemExit(f"no kernels for {device}")
    runner.run([x.data_ptr() for x in sources])
    for (codes, scales), (_, piece) in zip(expected, pieces, strict=True):
        same = torch.equal(codes.view(torch.uint8), piece.destination.cpu().view(torch.uint8))
        assert piece.scales is not None
        if not same or not torch.equal(scales, piece.scales.cpu()):
            raise SystemExit(f"bytes differ from the reference: {tuple(codes.shape)}; no numbers")


def competitors(source: torch.Tensor) -> dict[str, Run]:
    """What is installed of the others, called as their own callers call them."""
    if not source.is_cuda:
        return {}
    found: dict[str, Run] = {}
    try:
        from verl.utils.kernel.fp8_kernel import scaled_fp8_blockwise

        found["veRL"] = lambda: scaled_fp8_blockwise(source.to(torch.bfloat16), list(BLOCK))
    except ImportError:
        pass
    try:
        from torchao.prototype.blockwise_fp8_training.kernels import (
            triton_fp8_blockwise_weight_quant_rhs as torchao_cast,
        )

        found["torchao"] = lambda: torchao_cast(source.to(torch.bfloat16), BLOCK[0])
    except ImportError:
        pass
    return found


def why_not(run: Run) -> str:
    """What a run raises at its first call (torchao takes whole blocks only); empty if nothing."""
    try:
        run()
    except Exception as error:  # noqa: BLE001 - whatever it is, the others are measured
        return f"{type(error).__name__}: {error}"[:200]
    return ""


def cache_bytes(device: torch.device) -> int:
    """Of the last cache before the memory; nothing on a CPU, where only the script is tried."""
    if device.type != "cuda":
        return 0
    return int(torch.cuda.get_device_properties(device).L2_cache_size)


def rotated(runs: list[Run]) -> Run:
    """One of them after the other, so that none finds its input in the cache."""
    turn = cycle(runs)
    return lambda: next(turn)()


def single(
    clock: Clock, case: str, number: str, dtype: torch.dtype, shape: tuple[int, int], repeat: int
) -> Iterator[dict[str, Any]]:
    """One tensor: G1 (BF16), G2 (FP32), G9 (per channel)."""
    device = clock.device
    block = (1, shape[1]) if number == "G9" else BLOCK
    floor = shape[0] * shape[1] * (dtype.itemsize + 1)
    sets: list[dict[str, Run]] = []
    for _ in range(1 + _CACHES * cache_bytes(device) // floor):
        source = torch.randn(shape, device=device).to(dtype)
        half = torch.empty(floor // 8, dtype=torch.int32, device=device)
        codes, scales = destination(*shape, block, device)
        runs: dict[str, Run] = {
            "copy": partial(torch.bitwise_not, half, out=torch.empty_like(half)),
            "sglang_fp8rl": partial(numerics.cast_into, source, codes, scales, block),
        }
        sets.append(runs if number == "G9" else runs | competitors(source))
    reasons = {what: reason for what, run in sets[0].items() if (reason := why_not(run))}
    for what, reason in reasons.items():
        yield {"id": number, "case": case, "what": what, "left_out": reason}
    runs = {what: rotated([one[what] for one in sets]) for what in sets[0] if what not in reasons}
    for row in rows_of(number, case, clock.interleaved(runs, repeat), floor):
        yield row | {"host_median_s": host_seconds(device, runs[row["what"]], repeat)}


def whole_model(clock: Clock, name: str, dtype: torch.dtype, repeat: int) -> Iterator[dict]:
    """G3 and G5: every weight of a model into served buffers, one call; peak extra memory."""
    device, model = clock.device, MODELS[name]
    pieces, total = [], 0
    largest = max(rows * cols for _, rows, cols, _ in model.weights())
    # Sources share one buffer the size of a bucket: a bucket's bytes are what is in flight.
    bucket = torch.randn(max(largest, min(model.elements, 1 << 28)), device=device).to(dtype)
    offset = 0
    for _, rows, cols, count in model.weights():
        codes = torch.zeros(count, rows, cols, dtype=torch.uint8, device=device)
        scales = torch.zeros(count, -(-rows // 128), -(-cols // 128), device=device)
        for at in range(count):
            if offset + rows * cols > bucket.numel():
                offset = 0
            view = bucket[offset : offset + rows * cols].view(rows, cols)
            place = (0, offset * bucket.element_size())
            one = codes[at].view(numerics.FP8_DTYPE)
            pieces.append((place, Piece(view, one, scales[at], BLOCK, Kind.CAST)))
            offset += rows * cols
            total += rows * cols
    began = time.perf_counter()
    runner = make_runner(table_of(pieces), device, pow2_scale=False, round_to_bf16=True)
    build = time.perf_counter() - began
    assert runner is not None
    addresses = [bucket.data_ptr()]
    runner.run(addresses)
    grown = 0
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        runner.run(addresses)
        grown = torch.cuda.max_memory_allocated() - before
    seconds = clock.interleaved({"sglang_fp8rl": lambda: runner.run(addresses)}, repeat)
    floor = total * (bucket.element_size() + 1)
    for row in rows_of("G3", f"{name} {dtype}", seconds, floor):
        yield {
            **row,
            "tensors": len(pieces),
            "launches": len(getattr(runner, "launches", [])),
            "table_bytes": _table_bytes(runner),
            "build_s": build,
            "peak_extra_bytes": grown,
        }


def _table_bytes(runner: Any) -> int:
    """Memory of a table and its programs and flags, where it runs."""
    if not hasattr(runner, "launches"):
        return int(runner.table.pieces.nbytes)
    held = (runner._rows, runner._flags, runner._call, *(one.owners for one in runner.launches))
    return sum(one.nbytes for one in held)


def rows_of(
    number: str, case: str, seconds: dict[str, list[float]], floor: int
) -> Iterator[dict[str, Any]]:
    copy = measured.spread(seconds["copy"])["median_s"] if "copy" in seconds else None
    for what, values in seconds.items():
        times = measured.spread(values)
        median = times["median_s"]
        yield {
            "id": number,
            "case": case,
            "what": what,
            **times,
            "floor_bytes": floor,
            "gb_per_s": floor / median / 1e9,
            "of_copy": copy / median if copy else None,
        }


def cases(clock: Clock, smoke: bool, repeat: int) -> list[Callable[[], Iterator[dict]]]:
    """Most important first."""
    large = (512, 512) if smoke else (16384, 8192)
    small = (256, 256) if smoke else (1024, 1024)
    middle = (256, 384) if smoke else (4096, 4096)
    names = ["Qwen3-0.6B"] if smoke else ["Qwen3-30B-A3B", "Qwen3-8B"]
    found: list[Callable[[], Iterator[dict]]] = [
        lambda: single(clock, f"{large} BF16", "G1", torch.bfloat16, large, repeat),
        lambda: single(clock, f"{large} FP32", "G2", torch.float32, large, repeat),
        lambda: single(clock, f"{middle} BF16", "G1", torch.bfloat16, middle, repeat),
        lambda: single(clock, f"{small} BF16", "G1", torch.bfloat16, small, repeat),
    ]
    for name in names:
        for dtype in (torch.bfloat16,) if smoke else (torch.bfloat16, torch.float32):
            found.append(lambda n=name, d=dtype: whole_model(clock, n, d, repeat))  # type: ignore
    found.append(lambda: single(clock, f"{large} BF16", "G9", torch.bfloat16, large, repeat))
    for label, rows, cols in MISALIGNED:
        shape = (rows, cols) if smoke else (rows * 64, cols)
        found.append(
            lambda la=label, sh=shape: single(clock, la, "G4", torch.bfloat16, sh, repeat)  # type: ignore
        )
    return found


def main(
    smoke: Annotated[bool, typer.Option("--smoke", help="tiny cases on the CPU")] = False,
    repetitions: Annotated[int, typer.Option(help="timed runs of each")] = 30,
    json_path: Annotated[Path | None, typer.Option("--json", help="append JSON lines")] = None,
) -> None:
    """Time the cast on a GPU; exit 1 if bytes differ, 2 without a GPU."""
    console = Console()
    device = device_of(console, smoke=smoke)
    clock = Clock(device)
    gate(device)
    rows: list[dict[str, Any]] = []
    jobs = cases(clock, smoke, 3 if smoke else repetitions)
    where = conditions(device)
    with Progress(console=console) as progress:
        for job in progress.track(jobs, description="timing"):
            found = list(job())
            rows += found
            # Now: whatever ends this run early leaves them behind.
            measured.append(None if smoke else json_path, found, **where)
            if device.type == "cuda":
                torch.cuda.empty_cache()
    columns = ("id", "case", "what", "median ms", "GB/s of floor", "of copy", "host µs")
    table = measured.table(f"cast on {_device_name(device)}", columns, words=3)
    for row in rows:
        if "left_out" in row:
            console.print(f"{row['id']} {row['case']}: {row['what']} left out: {row['left_out']}")
            continue
        of_copy = f"{row['of_copy']:.2f}" if row["of_copy"] else ""
        host = f"{row['host_median_s'] * 1e6:.0f}" if "host_median_s" in row else ""
        table.add_row(
            row["id"], row["case"], row["what"], f"{row['median_s'] * 1e3:.3f}",
            f"{row['gb_per_s']:.0f}", of_copy, host,
        )  # fmt: skip
    console.print(table)


def device_of(console: Console, *, smoke: bool) -> torch.device:
    """The GPU, or the CPU for a smoke run; exit 2 without a GPU."""
    if not smoke and not torch.cuda.is_available():
        console.print("[red]no GPU: nothing measured; run it on a GPU host, or try --smoke[/red]")
        raise typer.Exit(2)
    return torch.device("cpu" if smoke else "cuda")


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name() if device.type == "cuda" else "this CPU (smoke run)"


def conditions(device: torch.device) -> dict[str, Any]:
    return {
        "gpu": _device_name(device),
        "driver": measured.said(_DRIVER),
        "commit": measured.commit(),
        **measured.versions("torch", "triton"),
    }


if __name__ == "__main__":
    typer.run(main)
