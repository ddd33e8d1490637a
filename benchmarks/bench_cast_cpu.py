"""C1 and C2: the CPU cast against plain torch and veRL's CPU fallback, in one process on the same inputs.

    python benchmarks/bench_cast_cpu.py               # C1, FP32 and BF16 source, and C2
    python benchmarks/bench_cast_cpu.py --json out.jsonl

Our bytes are compared with the reference cast first; if one differs, it exits 1 without a number.

- `in place` is `numerics.cast_into`, what the engine calls; `quantize_…` are the public
  functions, which allocate what they return.
- `eager` is the same cast in whole-matrix torch operations, its bytes compared too.
- `verl` is `scaled_fp8_blockwise` without Triton, called as veRL calls it, on `v.to(bfloat16)`.

Runs are interleaved; time is the median with p10 and p90.
"""

from __future__ import annotations

import json
import math
import pathlib
import platform
from collections.abc import Callable, Iterator
from functools import partial
from typing import Annotated, Any

import measured
import torch
import typer
from outcome import SLOWER
from rich.console import Console

import sglang_fp8rl
from sglang_fp8rl import numerics
from sglang_fp8rl.formats.format import BlockGrid

BLOCK, MIB = (128, 128), 1 << 20
MIN_RATIO, MAX_GROWTH_MIB = 8.0, 64.0  # what C1 and C2 ask for
BASELINES = ("verl", "eager")
HIDDEN, INTERMEDIATE, LAYERS = 1024, 3072, 28  # Qwen3-0.6B: 16 query and 8 KV heads of 128
QWEN3_0_6B = [
    ("q_proj", 2048, HIDDEN),
    ("k_proj", 1024, HIDDEN),
    ("v_proj", 1024, HIDDEN),
    ("o_proj", HIDDEN, 2048),
    ("gate_proj", INTERMEDIATE, HIDDEN),
    ("up_proj", INTERMEDIATE, HIDDEN),
    ("down_proj", HIDDEN, INTERMEDIATE),
]


class Destination:
    """Codes and scales for any matrix up to one size: what an engine has allocated already."""

    def __init__(self, elements: int) -> None:
        self.codes = torch.zeros(elements, dtype=torch.uint8)
        self.scales = torch.zeros(elements // 128 + 1)

    def view(self, shape: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor]:
        rows, cols = BlockGrid(shape, BLOCK).scale_shape
        codes = self.codes[: shape[0] * shape[1]].view(numerics.FP8_DTYPE).view(shape)
        return codes, self.scales[: rows * cols].view(rows, cols)


def verl_fallback() -> Callable[[torch.Tensor], Any] | None:
    """veRL's cast as its loop calls it on a CPU, or None without veRL."""
    try:
        from verl.utils.kernel.fp8_kernel import _scaled_fp8_blockwise_pytorch
    except ImportError:
        return None
    return lambda v: _scaled_fp8_blockwise_pytorch(v.to(torch.bfloat16), list(BLOCK))


def eager(x: torch.Tensor, block: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor]:
    """The cast as it is written in torch, one operation on the whole matrix after the other.

    Blocks have to divide the matrix. Returns codes [N, K], and scales [N / block_n, K / block_k].
    """
    (rows, cols), (block_n, block_k) = x.shape, block
    tiles = x.to(torch.bfloat16).float().view(rows // block_n, block_n, cols // block_k, block_k)
    scales = tiles.abs().amax((1, 3), keepdim=True) / numerics.FP8_MAX
    codes = (tiles / scales).clamp(-numerics.FP8_MAX, numerics.FP8_MAX).to(numerics.FP8_DTYPE)
    return codes.view(rows, cols), scales[:, 0, :, 0]


def same(actual: tuple[torch.Tensor, ...], expected: tuple[torch.Tensor, ...]) -> bool:
    pairs = zip(actual, expected, strict=True)
    return all(
        one.shape == other.shape and torch.equal(one.view(torch.uint8), other.view(torch.uint8))
        for one, other in pairs
    )


def gate() -> None:
    """Bytes equal to the reference, ragged and not finite included, or no number at all."""
    generator = torch.Generator().manual_seed(1)
    for shape in ((1, 1), (127, 257), (576, 1368), (1024, 3072)):
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            x = torch.randn(shape, generator=generator).to(dtype)
            blocks = numerics.quantize(x, BLOCK, backend="reference")
            rows = numerics.quantize(x, (1, shape[1]), backend="reference")
            codes, scales = torch.empty_like(blocks[0]), torch.empty_like(blocks[1])
            flags = numerics.cast_into(x, codes, scales, BLOCK)
            is_same = (
                same((codes, scales), blocks)
                and not flags.any()
                and same(sglang_fp8rl.quantize_blockwise(x), blocks)
                and same(sglang_fp8rl.quantize_per_channel(x), rows)
            )
            if shape == (1024, 3072):
                is_same &= same(eager(x, BLOCK), blocks) and same(eager(x, (1, shape[1])), rows)
            if not is_same:
                typer.echo(
                    f"bytes differ from the reference: {shape} {dtype}; no numbers", err=True
                )
                raise typer.Exit(1)
    x = torch.ones(200, 200)
    x[150, 10] = float("nan")
    codes, scales = Destination(x.numel()).view((200, 200))
    flags = numerics.cast_into(x, codes, scales, BLOCK)
    written = codes.view(torch.uint8) != 0
    if flags.tolist() != [[False, False], [True, False]] or written.sum() != 200 * 200 - 72 * 128:
        typer.echo("a block with a NaN was written, or another was not; no numbers", err=True)
        raise typer.Exit(1)


def c1(dtype: torch.dtype, rows: int, repetitions: int) -> Iterator[dict[str, Any]]:
    """One tensor, one thread: in place and through the public functions."""
    source = torch.randn(rows, 4096, generator=torch.Generator().manual_seed(0)).to(dtype)
    codes, scales = Destination(source.numel()).view((rows, 4096))
    blockwise: dict[str, Callable[[], Any]] = {
        "in place": lambda: numerics.cast_into(source, codes, scales, BLOCK),
        "quantize_blockwise": lambda: sglang_fp8rl.quantize_blockwise(source),
        "eager": lambda: eager(source, BLOCK),
    }
    if verl := verl_fallback():
        blockwise["verl"] = lambda: verl(source)
    per_channel: dict[str, Callable[[], Any]] = {
        "quantize_per_channel": lambda: sglang_fp8rl.quantize_per_channel(source),
        "eager": lambda: eager(source, (1, 4096)),
    }
    case = f"[{rows}, 4096] {str(dtype).removeprefix('torch.')}"
    floor = source.numel() * (source.element_size() + 1)
    for granularity, runs in (("blockwise", blockwise), ("per channel", per_channel)):
        for name, seconds in measured.interleaved(runs, repetitions).items():
            yield {
                "id": "C1",
                "case": f"{case} {granularity}",
                "what": name,
                **measured.spread(seconds),
                "elements": source.numel(),
                "floor_bytes": floor,
                "repetitions": repetitions,
            }


def c2(layers: int, repetitions: int) -> Iterator[dict[str, Any]]:
    """Every quantized weight of Qwen3-0.6B, made one at a time: only the casts are timed."""
    generator = torch.Generator().manual_seed(0)
    buffer = torch.empty(INTERMEDIATE * HIDDEN)
    destination = Destination(buffer.numel())
    verl = verl_fallback()
    seconds: dict[str, list[float]] = {"in place": [], **({"verl": []} if verl else {})}
    growth = dict.fromkeys(seconds, 0.0)
    elements = layers * sum(n * k for _, n, k in QWEN3_0_6B)
    for repetition in range(-1, repetitions):  # the first one warms up and measures memory
        total = dict.fromkeys(seconds, 0.0)
        for _ in range(1 if repetition < 0 else layers):
            for _, n, k in QWEN3_0_6B:
                source = buffer[: n * k].view(n, k).normal_(generator=generator)
                codes, scales = destination.view((n, k))
                runs: dict[str, Callable[[], Any]] = {
                    "in place": partial(numerics.cast_into, source, codes, scales, BLOCK)
                }
                if verl:
                    runs["verl"] = partial(verl, source)
                for name, run in runs.items():
                    _, before = measured.resident_bytes(reset_peak=repetition < 0)
                    total[name] += measured.seconds_of(run)
                    if repetition < 0:
                        _, peak = measured.resident_bytes()
                        growth[name] = max(growth[name], (peak - before) / MIB)
        if repetition >= 0:
            for name in seconds:
                seconds[name].append(total[name])
    for name, values in seconds.items():
        yield {
            "id": "C2",
            "case": f"Qwen3-0.6B, {layers * len(QWEN3_0_6B)} tensors, float32",
            "what": name,
            **measured.spread(values),
            "elements": elements,
            "floor_bytes": elements * 5,
            "memory_growth_mib": round(growth[name], 1),
            "repetitions": repetitions,
        }


def conditions(threads: int) -> dict[str, Any]:
    cpu = platform.processor() or platform.machine()
    info = pathlib.Path("/proc/cpuinfo")
    if info.exists():
        cpu = info.read_text().split("model name")[1].split("\n")[0].strip("\t :")
    versions = measured.versions("torch", "numba", "verl")
    return {"cpu": cpu, "threads": threads, "commit": measured.commit(), **versions}


def main(
    repetitions: Annotated[int, typer.Option(help="Timed runs of C1; C2 takes a third.")] = 30,
    threads: Annotated[int, typer.Option(help="For both sides.")] = 1,
    json_path: Annotated[
        pathlib.Path | None, typer.Option("--json", help="Write JSON lines there.")
    ] = None,
) -> None:
    """The CPU cast against plain torch and veRL's fallback (C1: one tensor, C2: Qwen3-0.6B)."""
    torch.set_num_threads(threads)
    gate()  # which compiles what is timed
    # C2 first: once C1 has run, the heap has grown and hides what a cast allocates.
    whole_model = list(c2(LAYERS, max(1, repetitions // 3)))
    rows = [
        *c1(torch.float32, 4096, repetitions),
        *c1(torch.bfloat16, 4096, repetitions),
        *whole_model,
    ]
    for row in rows:
        row["gelem_per_s"] = row["elements"] / row["median_s"] / 1e9
        for other in BASELINES:
            theirs = [r for r in rows if (r["case"], r["what"]) == (row["case"], other)]
            row[f"ratio_to_{other}"] = theirs[0]["median_s"] / row["median_s"] if theirs else None
    if json_path:
        where = conditions(threads)
        json_path.write_text("".join(json.dumps({**row, **where}) + "\n" for row in rows))
    else:
        show(rows, conditions(threads))
    slow = [
        f"{row['what']} {row['case']}: {row[f'ratio_to_{other}']:.1f} × {other}"
        for row in rows
        for other in BASELINES
        if row["what"] not in BASELINES and (row[f"ratio_to_{other}"] or math.inf) < MIN_RATIO
    ]
    grown = [
        row["what"]
        for row in rows
        if row["what"] not in BASELINES and row.get("memory_growth_mib", 0.0) > MAX_GROWTH_MIB
    ]
    if grown:
        typer.echo(f"memory grew by more than {MAX_GROWTH_MIB} MiB: {'; '.join(grown)}", err=True)
        raise typer.Exit(1)
    if slow:
        typer.echo(f"below {MIN_RATIO} ×: {'; '.join(slow)}", err=True)
        raise typer.Exit(SLOWER)


def show(rows: list[dict[str, Any]], where: dict[str, Any]) -> None:
    columns = (
        "id",
        "case",
        "what",
        "median ms",
        "p10–p90 ms",
        "Gelem/s",
        "× veRL",
        "× eager",
        "MiB",
    )
    table = measured.table(", ".join(f"{k} {v}" for k, v in where.items()), columns, words=3)
    for row in rows:
        table.add_row(
            row["id"],
            row["case"],
            row["what"],
            f"{row['median_s'] * 1e3:.2f}",
            f"{row['p10_s'] * 1e3:.2f}–{row['p90_s'] * 1e3:.2f}",
            f"{row['gelem_per_s']:.2f}",
            *(f"{row[f'ratio_to_{b}']:.1f}" if row[f"ratio_to_{b}"] else "" for b in BASELINES),
            f"{row['memory_growth_mib']:.1f}" if "memory_growth_mib" in row else "",
        )
    console = Console()
    console.width = max(console.width, 140)  # a pipe says 80
    console.print(table)


if __name__ == "__main__":
    typer.run(main)
