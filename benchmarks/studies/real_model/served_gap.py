"""`make served-gap`: what is left of FP8's gap when the trainer computes with the weights as they are served.

Three servers sample answers of their own, token by token; `transformers` in BF16 says how likely these
tokens are to it, with its own weights and with those that the server holds, which is proven by bytes
while the server runs. `--all`: one server more, with an FP8 KV cache, and one trainer more, which quantizes
its activations too.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import measured
import torch
from rich.console import Console
from rich.progress import Progress

from sglang_fp8rl.client import RefitClient
from sglang_fp8rl.lab.eval.gap import load_model
from sglang_fp8rl.lab.eval.server import Rollout
from sglang_fp8rl.trainer.served_weights import check_as_served

from . import measures, texts
from .arms import ARMS, BASELINE, DEFAULT, Arm
from .fetch import fetch
from .models import cache_folder
from .report import Line, interval
from .served_trainers import PLAIN, QUANTIZED, SERVED, logprobs, trainer
from .serving import ArmServer
from .trainer_side import check_memory

# Of a BF16 server. The part of a plain FP8 server's gap that may be left, and how far above BF16's.
PART_LEFT, ABOVE_BF16 = 0.5, 1.2
WEIGHTS_ONLY = "fp8_weights_only"  # of so many answers at once, rows are doubled
_EXACT = Arm(
    "fp8_exact",
    "activations stay BF16, and our own product has all batches",
    options={"activations": "bf16", "exact_product_tokens": 1_000_000},
)
KNOWN = {**ARMS, _EXACT.name: _EXACT}
SERVERS: tuple[str, ...] = (DEFAULT, WEIGHTS_ONLY, _EXACT.name, BASELINE)
TRAINERS: tuple[str, ...] = (PLAIN, SERVED)
ALL_SERVERS, ALL_TRAINERS = (*SERVERS, "fp8_kv_cache"), (*TRAINERS, QUANTIZED)
_COPIES = 3.0


def measure(
    name: str,
    answers: int,
    answer_tokens: int,
    console: Console,
    *,
    threads: int,
    seed: int = 1,
    servers: Sequence[str] = SERVERS,
    trainers: Sequence[str] = TRAINERS,
    keep: Callable[[list[Line]], object] = list,
) -> list[Line]:
    """One line for each server and trainer, behind one of conditions.

    Args:
        keep: gets the lines so far after each server.

    Raises:
        Fp8RlError: bad input, too little memory, a server that fails; or the trainer does not compute
            with the bytes that the server holds.

    Side effects:
        Writes each server's log and its answers, a line each, into `answers_folder(name)`.
    """
    from transformers import AutoTokenizer

    folder = fetch(name, console)
    check_memory(folder, _COPIES)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    prompts = texts.prompts(texts.PROMPTS, tokenizer, answers)
    torch.set_num_threads(threads)
    model = load_model(str(folder), "bfloat16", "cpu")
    conditions = {
        "kind": "conditions",
        "model": name,
        "answers": answers,
        "answer_tokens": answer_tokens,
        "seed": seed,
        **measured.versions("sglang", "torch"),
        "threads": threads,
    }
    lines = [conditions]
    kept = answers_folder(name)
    kept.mkdir(parents=True, exist_ok=True)
    with Progress(console=console) as progress:
        for arm in (KNOWN[server] for server in servers):
            task = progress.add_task(f"{arm.name}: answering", total=answers * answer_tokens)
            with ArmServer(arm, folder, threads, seed, kept / f"{arm.name}.log") as server:
                sampled = server.sample(
                    prompts,
                    answer_tokens,
                    [tokenizer.eos_token_id],
                    lambda tokens: progress.advance(task, tokens),  # noqa: B023
                )
                progress.update(task, completed=answers * answer_tokens)
                rows = [json.dumps(asdict(one)) + "\n" for one in sampled]
                (kept / f"{arm.name}.jsonl").write_text("".join(rows))
                for line in _scored(arm, trainers, sampled, model, server.url, progress):
                    lines.append(line)
                    k3 = interval(line["kl_k3"])
                    progress.console.print(f"{arm.name}, trainer {line['trainer']}: k3 {k3}")
            keep(lines)
    return lines


def answers_folder(name: str) -> Path:
    """Where the last run's answers and logs lie."""
    return cache_folder() / "served-gap" / name


def _scored(
    arm: Arm,
    trainers: Sequence[str],
    sampled: Sequence[Rollout],
    model: Any,
    url: str,
    progress: Progress,
) -> list[Line]:
    """The gap of one server's answers to each trainer; of a BF16 server, to the one that there is."""
    client = RefitClient(url)
    plan = client.plan() if arm.quantized else None
    rows = [torch.tensor(one.logprobs) for one in sampled]
    lines: list[Line] = []
    plain: measures.Gap | None = None
    for name in trainers if arm.quantized else (PLAIN,):
        scored = []
        with trainer(model, name, plan):
            proven = 0 if name == PLAIN else check_as_served(model, client).compared
            for rollout in progress.track(sampled, description=f"{arm.name}: {name}"):
                scored += logprobs(model, [rollout])
        gap = measures.gap(rows, scored)
        plain = plain or gap
        lines.append(_line(arm, name, gap, proven, plain))
    return lines


def _line(arm: Arm, name: str, gap: measures.Gap, proven: int, plain: measures.Gap) -> Line:
    drawn = measures.Resamples(len(gap.log_ratio))
    return {
        "kind": "gap",
        "server": arm.name,
        "trainer": name,
        "tokens": len(gap.flat),
        **measures.means(gap, drawn),
        "above_tis_cap": float((gap.flat > torch.tensor(measures.TIS_CAP).log().item()).mean()),
        "worst": float(abs(gap.flat).max()),
        "tensors_proven": proven,
        **({} if gap is plain else {"to_plain": measures.against(gap, plain, drawn)}),
    }


def report(lines: Sequence[Line], console: Console) -> bool:
    """Show the table, and the four numbers last; whether they are within their bounds."""
    table = measured.table(
        f"{lines[0]['model']}: answers that each server sampled itself [95 %]",
        (
            "server",
            "trainer",
            "k3 KL",
            "/ plain",
            "mult. error",
            "> C=2",
            "worst",
            "tokens",
            "proven",
        ),
        words=2,
    )
    for line in lines[1:]:
        table.add_row(
            line["server"],
            line["trainer"],
            interval(line["kl_k3"]),
            interval(line["to_plain"]["kl_k3"], ".2f") if "to_plain" in line else "",
            interval(line["mult_prob_error"], ".3f"),
            f"{line['above_tis_cap']:.2%}",
            f"{line['worst']:.2f}",
            str(line["tokens"]),
            f"{line['tensors_proven']} tensors" if line["tensors_proven"] else "",
        )
    console.print(table)
    k3 = {(one["server"], one["trainer"]): one["kl_k3"]["value"] for one in lines[1:]}
    plain, served = k3[DEFAULT, PLAIN], k3[DEFAULT, SERVED]
    both, bf16 = k3[WEIGHTS_ONLY, SERVED], k3[BASELINE, PLAIN]
    console.print(
        f"k3 plain {plain:.4g}, served {served:.4g}, with BF16 activations {both:.4g}, BF16 {bf16:.4g}",
        highlight=False,
    )
    return served <= PART_LEFT * plain and both <= ABOVE_BF16 * bf16
