"""What a trained policy loses by the way it is deployed.

One policy is served in several ways. Each answers every held-out sum, and says how likely the right answer
is to it: the share of sampled answers that are right, without the noise of sampling. Differences between
two ways are paired by problem.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import measured
import numpy as np
import torch
from rich.console import Console
from rich.progress import Progress

from sglang_fp8rl.lab.export import export_checkpoint
from sglang_fp8rl.lab.plan_offline import make_plan
from sglang_fp8rl.trainer.served_weights import (
    compute_as_served,
    compute_as_stored,
    served_modules,
)
from sglang_fp8rl.trainer.served_weights.modules import served
from sglang_fp8rl.wire.plan import RefitPlan

from .arms import BASELINE, Arm
from .fetch import fetch
from .measures import Resamples
from .models import cache_folder
from .report import Line, interval
from .rl import RESPONSE_TOKENS, rl_arms
from .rl_runs import kept_policy
from .serving import ArmServer
from .sums import LARGEST, Encode, Sum, encoder_of, make_sum

START = "start"  # the policy that was not trained
_BATCH = 128


def ways(folded: Path, exported: Path) -> Iterator[tuple[str, Arm, Path | None]]:
    """Name, server, and the checkpoint where it is not the policy's own."""
    arms = rl_arms()
    fp8, bf16 = arms["fp8"].serving, arms[BASELINE].serving
    yield "BF16", bf16, None
    yield "served weights in BF16", bf16, folded
    yield "FP8, activations in BF16", arms["served_bf16_activations"].serving, None
    yield "FP8, as trained", fp8, None
    # Whole blocks in FP8, everything else in BF16.
    yield "block FP8, as exported", replace(fp8, options={"misaligned": "bf16"}), exported


def fold(folder: Path, plan: RefitPlan, out: Path) -> None:
    """Write a checkpoint of the weights that the plan's server holds, in BF16."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    compute_as_served(model, plan)
    with torch.no_grad():
        for rules, module in served_modules(model):
            for leaf, rule in rules.items():
                weight = getattr(module, leaf)
                weight.copy_(served(weight, rule))
    compute_as_stored(model)
    model.bfloat16().save_pretrained(out)


def held_out_sums(encode: Encode) -> list[Sum]:
    """All there are."""
    numbers = range(1, LARGEST + 1)
    every = [make_sum(one, other, encode) for one in numbers for other in numbers]
    return [problem for problem in every if problem.is_held_out]


def answered(server: ArmServer, problems: Sequence[Sum], end: list[int]) -> dict[str, np.ndarray]:
    """For each problem: is the greedy answer right, and how likely is the right one."""
    server.sample([problems[0].prompt], 1, end)  # what all prompts begin with, into the cache
    prompts = [problem.prompt for problem in problems]
    answers = server.sample(prompts, RESPONSE_TOKENS, end, temperature=0.0)
    scored = server.score([(p.prompt, p.answer) for p in problems], lambda tokens: None)
    return {
        "greedy": np.array(
            [float(a.output_ids == p.answer) for a, p in zip(answers, problems, strict=True)]
        ),
        "chance": np.array([row.double().sum().exp().item() for row in scored]),
    }


def run_deployed(
    model: str, arm: str, seed: int, console: Console, *, threads: int, path: Path | None
) -> None:
    """Serve what `python -m studies.real_model rl --keep` left in every way, show it and append it to `path`.

    Raises:
        ConfigError: it left nothing.
    """
    start = fetch(model, console)
    policy = start if arm == START else kept_policy(model, arm, seed)
    encode = encoder_of(start)
    problems, end = held_out_sums(encode), encode("\n")
    drawn, ones = Resamples(len(problems)), np.ones(len(problems))
    found: dict[str, dict[str, np.ndarray]] = {}
    logs = cache_folder() / "runs"
    with Progress(console=console) as progress, tempfile.TemporaryDirectory() as work:
        folded, exported = Path(work) / "folded", Path(work) / "exported"
        fold(policy, make_plan(str(policy)), folded)
        export_checkpoint(str(policy), exported)  # as `sglang-fp8rl export` does
        for name, serving, checkpoint in progress.track(list(ways(folded, exported))):
            log = logs / f"deployed-{arm}-{seed}.log"
            with ArmServer(
                serving, checkpoint or policy, threads, seed, log, remember=True, batch=_BATCH
            ) as server:
                found[name] = answered(server, problems, end)
            lost = found[name]["chance"] - found["BF16"]["chance"]
            line: Line = {
                "policy": arm,
                "seed": seed,
                "way": name,
                "problems": len(problems),
                "greedy": float(found[name]["greedy"].mean()),
                "chance": asdict(drawn.ratio(found[name]["chance"], ones)),
                "chance_less_bf16": asdict(drawn.ratio(lost, ones)),
            }
            made_with: dict[str, Any] = {"threads": threads, **measured.versions("sglang", "torch")}
            measured.append(path, [line], **made_with)
            progress.console.print(
                f"{arm}, {name}: greedy {line['greedy']:.3f}, "
                f"chance of the right answer {interval(line['chance'])}, "
                f"less BF16's {interval(line['chance_less_bf16'])}"
            )
