"""G12: decode throughput of FP8 against BF16, and the batch size from which FP8 is as fast.

Measured by SGLang's own `sglang.benchmark.one_batch_server`, in a process of its own against each
running server: random token ids, output tokens over the time after the last request's first token.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from byte_tokenizer import save_tokenizer

from sglang_fp8rl.errors import Fp8RlError

from .budget import Budget
from .models import batches
from .servers import BF16, OURS, Served

PROMPT_TOKENS = 32
_LEAST_S = 60.0  # of the budget; importing SGLang alone takes a good part of it


class DecodeError(Fp8RlError):
    """SGLang's benchmark failed or left something out; what was measured before it holds."""


def measure(
    served: Served, max_batch: int, output_tokens: int, repetitions: int, budget: Budget
) -> list[dict[str, Any]]:
    """Rows of tokens per second, smallest batch first.

    Side Effects:
        Writes the benchmark's log and results beside the server's log.

    Raises:
        DecodeError: the benchmark ends otherwise than well, or lacks a result.
    """
    what = served.mode.what
    if not budget.allows(f"G12, decoding of {what}", _LEAST_S):
        return []
    sizes = list(batches(max_batch))
    results = served.server.log_path.with_suffix(".decode.jsonl")
    log_path = served.server.log_path.with_suffix(".decode.log")
    tokenizer = served.server.log_path.with_suffix(".tokenizer")
    save_tokenizer(tokenizer)  # ids are drawn from it; the servers have none
    # Each size once more than is counted: at the first time, kernels may be compiled.
    repeated = [str(size) for size in sizes for _ in range(repetitions + 1)]
    command = [
        *(sys.executable, "-m", "sglang.benchmark.one_batch_server"),
        *("--model", "None", "--base-url", served.server.url),
        *("--local-tokenizer-path", str(tokenizer), "--dataset-name", "random-ids"),
        *("--batch-size", *repeated),
        *("--input-len", str(PROMPT_TOKENS), "--output-len", str(output_tokens)),
        *("--skip-warmup", "--no-append-to-github-summary", "--result-filename", str(results)),
    ]
    with log_path.open("wb") as log:
        try:
            done = subprocess.run(
                command,
                env=_environment(served.server.env),
                stdout=log,
                stderr=log,
                timeout=budget.left(),
                check=False,
            )
            ended = f"ended with {done.returncode}"
        except subprocess.TimeoutExpired:
            ended = "did not end within the budget"
    found = read_results(results)
    wanted = [size for size in sizes for _ in range(repetitions + 1)]
    if [batch for batch, _ in found] != wanted:
        raise DecodeError(
            what,
            f"SGLang's benchmark {ended}, with {len(found)} of {len(wanted)} results",
            "every batch size is measured",
            f"See {log_path} and {served.server.log_path}.",
        )
    return rows_of(what, output_tokens, found)


def _environment(server: Mapping[str, str]) -> dict[str, str]:
    """Of a client of that server: SGLang's benchmark reads a first digit in `CUDA_VISIBLE_DEVICES`, and
    a CPU's server has none.
    """
    return {key: value for key, value in server.items() if value or key != "CUDA_VISIBLE_DEVICES"}


def read_results(path: Path) -> list[tuple[int, float]]:
    """(batch, output tokens per second) of each line that SGLang's benchmark wrote."""
    lines = path.read_text().splitlines() if path.exists() else []
    records = map(json.loads, lines)
    return [(record["batch_size"], record["output_throughput"]) for record in records]


def rows_of(
    what: str, output_tokens: int, found: Iterable[tuple[int, float]]
) -> list[dict[str, Any]]:
    """One row for each batch size; its first result warms up and is left out."""
    by_batch: dict[int, list[float]] = {}
    for batch, tokens_per_s in found:
        by_batch.setdefault(batch, []).append(tokens_per_s)
    return [
        {
            "id": "G12",
            "what": what,
            "batch": batch,
            "output_tokens": output_tokens,
            "tokens_per_s": statistics.median(counted),
            "slowest_tokens_per_s": min(counted),
            "repetitions": len(counted),
        }
        for batch, (_, *counted) in by_batch.items()
    ]


def crossover(fp8: Mapping[int, float], bf16: Mapping[int, float]) -> int | None:
    """The smallest batch from which on FP8 is at least as fast at every batch measured of both."""
    found = None
    for batch in sorted(fp8.keys() & bf16.keys(), reverse=True):
        if fp8[batch] < bf16[batch]:
            break
        found = batch
    return found


def throughput(rows: Sequence[Mapping[str, Any]], what: str) -> dict[int, float]:
    """Batch → tokens per second."""
    return {row["batch"]: row["tokens_per_s"] for row in rows if row["what"] == what}


def say_crossover(rows: Sequence[Mapping[str, Any]]) -> str:
    fp8, bf16 = throughput(rows, OURS.what), throughput(rows, BF16.what)
    common = sorted(fp8.keys() & bf16.keys())
    if not common:
        return "G12: FP8 and BF16 have no batch size in common: no crossover"
    at = crossover(fp8, bf16)
    if at is None:
        return f"G12: FP8 is slower than BF16 at batch {common[-1]}, the largest: no crossover"
    return f"G12: FP8 is at least as fast as BF16 from batch {at} on, to {common[-1]}"


def plot(rows: Sequence[Mapping[str, Any]], title: str, path: Path) -> None:
    """Tokens per second over the batch size, both axes logarithmic; a bar goes down to the slowest run."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.5))
    axes = figure.subplots()
    for what in dict.fromkeys(row["what"] for row in rows):
        theirs = [row for row in rows if row["what"] == what]
        batches, medians = zip(*throughput(theirs, what).items(), strict=True)
        down = [row["tokens_per_s"] - row["slowest_tokens_per_s"] for row in theirs]
        up = [0.0] * len(down)
        axes.errorbar(batches, medians, yerr=[down, up], marker="o", capsize=3, label=what)
    at = crossover(throughput(rows, OURS.what), throughput(rows, BF16.what))
    if at is not None:
        axes.axvline(at, linestyle=":", color="gray", label=f"FP8 as fast from batch {at}")
    axes.set(xscale="log", yscale="log", xlabel="batch size", ylabel="decode tokens/s", title=title)
    axes.set_xticks(sorted({row["batch"] for row in rows}), minor=False)
    axes.xaxis.set_major_formatter("{x:.0f}")
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)
