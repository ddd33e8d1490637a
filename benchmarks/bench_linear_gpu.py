"""G13: one layer's product at M = 1 … 512 tokens: FP8 weights with BF16 activations, beside W8A8 and BF16.

    python benchmarks/bench_linear_gpu.py [--json FILE]
    python benchmarks/bench_linear_gpu.py --smoke          # tiny, on the CPU: is this script sound?

The product is compared with its definition before anything is timed; if it is too far from it there is no
number. Weights are rotated, so that none is found in the cache. W8A8 is what SGLang runs for this layer, the
quantization of its activations included: DeepGEMM and, beside it, SGLang's Triton kernel, where they are
installed. `of weights` is the time that the codes alone would take in memory, at the speed of a copy in the
same run, over the time taken.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import measured
import torch
import typer
from bench_gpu import Clock, Run, cache_bytes, conditions, device_of, rotated, rows_of
from rich.console import Console
from rich.progress import Progress

from sglang_fp8rl.lab.cpu_platform.cpu_linear import exact_linear
from sglang_fp8rl.lab.sensitivity.sqnr import sqnr_db
from sglang_fp8rl.numerics import quantize
from sglang_fp8rl.numerics.linear import doubled, linear

# Rows and columns of Qwen3-8B's layers: gate and up, down, QKV, output.
LAYERS = ((24576, 4096), (4096, 12288), (6144, 4096), (4096, 4096))
TOKENS = (1, 64, 128, 16, 32, 256, 4, 512)  # most important first
LEAST_SQNR_DB = 50.0  # rounding the output to BF16 leaves 54 and more
LEAST_DOUBLED_DB = 47.0  # and that of two halves 3 less
_CACHES = 4
Linear = Callable[..., torch.Tensor]


def w8a8() -> dict[str, Linear]:
    """SGLang's block-FP8 linears, by what they run; those that can be imported here."""
    try:
        from sglang.srt.layers.quantization import fp8_utils
    except ImportError:
        return {}
    names = {
        "W8A8 DeepGEMM": "deepgemm_w8a8_block_fp8_linear_with_fallback",
        "W8A8 Triton": "triton_w8a8_block_fp8_linear",
    }
    found = {what: getattr(fp8_utils, name) for what, name in names.items()}
    return found | {f"{what}, doubled": on_doubled_rows(one, what) for what, one in found.items()}


def on_doubled_rows(product: Linear, what: str) -> Linear:
    """With activations in BF16 all the same, as `engine/modules/linear.py` calls it."""
    from sglang_fp8rl.engine.modules.linear import padded

    def run(x: torch.Tensor, codes: torch.Tensor, *scales: Any) -> torch.Tensor:
        rows = padded(x, codes.shape[0]) if "DeepGEMM" in what else x
        first, rest = product(doubled(rows, 128), codes, *scales).chunk(2)
        return (first + rest)[: len(x)]

    return run


def gate(device: torch.device) -> None:
    """Exit 1 unless the product is near its definition, for each size of a tile."""
    codes, scale = quantize(torch.randn(384, 1024), (128, 128))
    for m in (1, 16, 17, 64, 65):
        x = torch.randn(m, 1024).bfloat16()
        found = linear(x.to(device), codes.to(device), scale.to(device)).cpu()
        near = sqnr_db(exact_linear(x.float(), codes, scale), found.float())
        if not near > LEAST_SQNR_DB:
            raise SystemExit(f"{near:.1f} dB from the definition at {m} tokens; no numbers")
        for what, product in (w8a8() if device.type == "cuda" else {}).items():
            found = product(x.to(device), codes.to(device), [128, 128], scale.to(device)).cpu()
            near = sqnr_db(exact_linear(x.float(), codes, scale), found.float())
            if "doubled" in what and not near > LEAST_DOUBLED_DB:
                raise SystemExit(f"{what}: {near:.1f} dB at {m} tokens; no numbers")


def layer_rows(clock: Clock, m: int, n: int, k: int, repeat: int) -> list[dict[str, Any]]:
    device = clock.device
    others = w8a8() if device.type == "cuda" else {}
    runs: dict[str, list[Run]] = {}
    for _ in range(1 + _CACHES * cache_bytes(device) // (n * k)):
        weight = torch.randn(n, k, device=device).bfloat16()
        codes, scale = quantize(weight, (128, 128))
        x = torch.randn(m, k, device=device).bfloat16()
        half = torch.empty(n * k // 2, dtype=torch.uint8, device=device)
        found: dict[str, Run] = {
            "copy": partial(torch.empty_like(half).copy_, half),
            "W8A16": partial(linear, x, codes, scale),
            "BF16": partial(torch.nn.functional.linear, x, weight),
        }
        for what, other in others.items():
            found[what] = partial(other, x, codes, [128, 128], scale)
        for what, run in found.items():
            runs.setdefault(what, []).append(run)
    times = clock.interleaved({what: rotated(each) for what, each in runs.items()}, repeat)
    rows = rows_of("G13", f"{n} × {k}", times, n * k)
    return [{**row, "tokens": m, "of_weights": row["of_copy"]} for row in rows]


def main(
    smoke: Annotated[bool, typer.Option("--smoke", help="tiny cases on the CPU")] = False,
    repetitions: Annotated[int, typer.Option(help="timed runs of each")] = 30,
    tokens: Annotated[list[int], typer.Option(min=1, help="of a batch, repeatable")] = list(TOKENS),  # noqa: B006
    json_path: Annotated[Path | None, typer.Option("--json", help="append JSON lines")] = None,
) -> None:
    """Time a layer's product on a GPU; exit 1 if it is wrong, 2 without a GPU."""
    console = Console()
    device = device_of(console, smoke=smoke)
    if smoke:
        import sglang_fp8rl.lab.cpu_platform.cpu_linear  # noqa: F401  registers the CPU's product
    gate(device)
    jobs = [(m, *layer) for m in tokens for layer in LAYERS]
    jobs = [(1, 256, 256)] if smoke else jobs
    columns = ("layer", "tokens", "what", "median µs", "of weights")
    table = measured.table("one layer's product", columns, words=3)
    where = conditions(device)
    with Progress(console=console) as progress:
        for job in progress.track(jobs, description="timing"):
            rows = layer_rows(Clock(device), *job, 3 if smoke else repetitions)
            # Now: whatever ends this run early leaves them behind.
            measured.append(None if smoke else json_path, rows, **where)
            for row in rows:
                shown = (row["case"], row["tokens"], row["what"], f"{row['median_s'] * 1e6:.1f}")
                table.add_row(*map(str, shown), f"{row['of_weights']:.2f}")
    console.print(table)


if __name__ == "__main__":
    typer.run(main)
