"""`make served-gap`: what is left of FP8's gap when the trainer computes with the weights as they are served.

Three servers sample answers of their own, token by token; `transformers` in BF16 says how likely these
tokens are to it, with its own weights and with those that the server holds, which is proven by bytes
while the server runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import measured
import torch
from rich.console import Console
from rich.progress import Progress
from small_dapo.wide_products import wide_products

from sglang_fp8rl.client import RefitClient
from sglang_fp8rl.lab.eval.rescoring import load_model, rescore
from sglang_fp8rl.lab.eval.rollouts import Rollout
from sglang_fp8rl.trainer.served_weights import (
    check_as_served,
    compute_as_served,
    compute_as_stored,
)

from . import measures, texts
from .arms import ARMS, BASELINE, DEFAULT, Arm
from .fetch import fetch
from .models import cache_folder
from .report import Line, interval
from .serving import ArmServer
from .trainer_side import check_memory

# Of a BF16 server. The part of a plain FP8 server's gap that may be left, and how far above BF16's.
PART_LEFT, ABOVE_BF16 = 0.5, 1.2
WEIGHTS_ONLY = "fp8_weights_only"
_COPIES = 3.0


def measure(
    name: str, answers: int, answer_tokens: int, console: Console, *, threads: int, seed: int = 1
) -> list[Line]:
    """One line for each server and trainer, behind one of conditions.

    Raises:
        Fp8RlError: bad input, too little memory, a server that fails; or the trainer does not compute
            with the bytes that the server holds.
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
    logs = cache_folder() / "served-gap"
    logs.mkdir(parents=True, exist_ok=True)
    with Progress(console=console) as progress:
        for arm in (ARMS[DEFAULT], ARMS[WEIGHTS_ONLY], ARMS[BASELINE]):
            task = progress.add_task(f"{arm.name}: answering", total=answers * answer_tokens)
            with ArmServer(arm, folder, threads, seed, logs / f"{arm.name}.log") as server:
                sampled = server.sample(
                    prompts,
                    answer_tokens,
                    [tokenizer.eos_token_id],
                    lambda tokens: progress.advance(task, tokens),  # noqa: B023
                )
                progress.update(task, completed=answers * answer_tokens)
                for line in _scored(arm, sampled, model, server.url, progress):
                    lines.append(line)
                    k3 = interval(line["kl_k3"])
                    progress.console.print(f"{arm.name}, trainer {line['trainer']}: k3 {k3}")
    return lines


def _scored(
    arm: Arm, sampled: Sequence[Rollout], model: Any, url: str, progress: Progress
) -> list[Line]:
    """The gap of one server's answers to the trainer as it is and, of an FP8 one, as served."""
    lines = [_line(arm, "BF16", _gap(arm, "BF16", sampled, model, progress), 0)]
    if arm.quantized:
        client = RefitClient(url)
        compute_as_served(model, client.plan())
        proven = check_as_served(model, client).compared
        found = _gap(arm, "weights as served", sampled, model, progress)
        compute_as_stored(model)
        lines.append(_line(arm, "weights as served", found, proven))
    return lines


def _gap(
    arm: Arm, trainer: str, sampled: Sequence[Rollout], model: Any, progress: Progress
) -> measures.Gap:
    scored = []
    with torch.no_grad(), wide_products():
        for rollout in progress.track(sampled, description=f"{arm.name}: {trainer}"):
            scored += rescore(model, [rollout])
    return measures.gap([torch.tensor(one.logprobs) for one in sampled], scored)


def _line(arm: Arm, trainer: str, gap: measures.Gap, proven: int) -> Line:
    drawn = measures.Resamples(len(gap.log_ratio))
    return {
        "kind": "gap",
        "server": arm.name,
        "trainer": trainer,
        "tokens": len(gap.flat),
        "kl_k3": asdict(drawn.ratio(gap.sums(measures.k3), gap.counts)),
        "mult_prob_error": asdict(drawn.ratio(gap.sums(measures.multiplicative), gap.counts)),
        "above_tis_cap": float((gap.flat > torch.tensor(measures.TIS_CAP).log().item()).mean()),
        "tensors_proven": proven,
    }


def report(lines: Sequence[Line], console: Console) -> bool:
    """Show the table, and the four numbers last; whether they are within their bounds."""
    table = measured.table(
        f"{lines[0]['model']}: answers that each server sampled itself [95 %]",
        ("server", "trainer", "k3 KL", "mult. error", "> C=2", "tokens", "proven"),
        words=2,
    )
    for line in lines[1:]:
        table.add_row(
            line["server"],
            line["trainer"],
            interval(line["kl_k3"]),
            interval(line["mult_prob_error"], ".3f"),
            f"{line['above_tis_cap']:.2%}",
            str(line["tokens"]),
            f"{line['tensors_proven']} tensors" if line["tensors_proven"] else "",
        )
    console.print(table)
    k3 = {(one["server"], one["trainer"]): one["kl_k3"]["value"] for one in lines[1:]}
    plain, served = k3[DEFAULT, "BF16"], k3[DEFAULT, "weights as served"]
    both, bf16 = k3[WEIGHTS_ONLY, "weights as served"], k3[BASELINE, "BF16"]
    console.print(
        f"k3 plain {plain:.4g}, served {served:.4g}, with BF16 activations {both:.4g}, BF16 {bf16:.4g}",
        highlight=False,
    )
    return served <= PART_LEFT * plain and both <= ABOVE_BF16 * bf16
