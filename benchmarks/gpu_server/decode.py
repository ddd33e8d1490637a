"""G12: decode throughput of FP8 against BF16, and the batch size from which FP8 is as fast."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from sglang_fp8rl.errors import Fp8RlError

from .budget import Budget
from .models import batches
from .refit import GateError
from .servers import BF16, OURS, Served

PROMPT_TOKENS = 32


class ClockError(Fp8RlError):
    """A time that says nothing; what was measured before it holds."""


def measure(
    servers: Sequence[Served],
    vocab_size: int,
    max_batch: int,
    output_tokens: int,
    repetitions: int,
    budget: Budget,
    tick: Callable[[str], None],
) -> list[dict[str, Any]]:
    """Rows of tokens per second, smallest batch first.

    A request of `output_tokens` + 1 less one of a single token is decoding alone: prefill, HTTP and
    scheduling of a new batch cancel.

    Raises:
        GateError: an answer does not have the length that was asked for.
        ClockError: see `row_of`.
    """
    rows, longest = [], 1.0
    for batch in batches(max_batch):
        if not budget.allows(f"G12, batch {batch} and more", 2 * longest):
            break
        began = time.monotonic()
        prompts = prompts_of(batch, vocab_size)
        seconds: dict[str, list[float]] = {served.mode.what: [] for served in servers}
        for repetition in range(repetitions + 1):
            for served in servers:
                tick(f"decode, batch {batch}, {served.mode.what}")
                first = _generate(served, prompts, 1)
                both = _generate(served, prompts, 1 + output_tokens)
                if repetition:  # the first time, kernels may be compiled
                    seconds[served.mode.what].append(both - first)
        for what, found in seconds.items():
            rows.append(row_of(what, batch, output_tokens, found))
        longest = time.monotonic() - began
    return rows


def row_of(what: str, batch: int, output_tokens: int, seconds: Sequence[float]) -> dict[str, Any]:
    """One row.

    Raises:
        ClockError: the longer requests did not take longer: the clock says nothing.
    """
    median = statistics.median(seconds)
    if median <= 0:
        raise ClockError(
            f"{what}, batch {batch}",
            f"{output_tokens} more tokens took {median:.4f} s",
            "longer answers take longer",
            "Take more --output-tokens, and leave the machine alone.",
        )
    return {
        "id": "G12",
        "what": what,
        "batch": batch,
        "output_tokens": output_tokens,
        "tokens_per_s": batch * output_tokens / median,
        "slowest_tokens_per_s": batch * output_tokens / max(seconds),
        "repetitions": len(seconds),
    }


def prompts_of(batch: int, vocab_size: int) -> list[list[int]]:
    draw = random.Random(batch)
    return [[draw.randrange(vocab_size) for _ in range(PROMPT_TOKENS)] for _ in range(batch)]


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
    """Tokens per second over the batch size, both axes logarithmic."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.5))
    axes = figure.subplots()
    for what in dict.fromkeys(row["what"] for row in rows):
        found = throughput(rows, what)
        axes.plot(list(found), list(found.values()), marker="o", label=what)
    at = crossover(throughput(rows, OURS.what), throughput(rows, BF16.what))
    if at is not None:
        axes.axvline(at, linestyle=":", color="gray", label=f"FP8 as fast from batch {at}")
    axes.set(xscale="log", yscale="log", xlabel="batch size", ylabel="decode tokens/s", title=title)
    axes.set_xticks(sorted({row["batch"] for row in rows}), minor=False)
    axes.xaxis.set_major_formatter("{x:.0f}")
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def _generate(served: Served, prompts: list[list[int]], tokens: int) -> float:
    began = time.perf_counter()
    answers = served.server.generate(prompts, tokens, return_logprob=False)
    seconds = time.perf_counter() - began
    lengths = {answer["meta_info"]["completion_tokens"] for answer in answers}
    if lengths != {tokens} or len(answers) != len(prompts):
        raise GateError(
            served.mode.what,
            f"{len(answers)} answers of {sorted(lengths)} tokens",
            f"{len(prompts)} of {tokens} were asked for",
            f"See {served.server.log_path}.",
        )
    return seconds
