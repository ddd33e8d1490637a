"""Which activations matter to a trainer that computes with served weights, which are the same on both sides?

A default server samples answers (`served-gap`); servers that leave some modules' activations in BF16
(`bf16_activations`) then say how likely the same tokens are, by prefill. All of them hold the same bytes, so
the trainer's log-probabilities, with the weights as served, are taken once, and shares are paired.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import measured
import torch
from rich.console import Console
from rich.progress import Progress

from sglang_fp8rl.client import RefitClient
from sglang_fp8rl.errors import ConfigError
from sglang_fp8rl.lab.eval.gap import load_model
from sglang_fp8rl.lab.eval.server import Rollout
from sglang_fp8rl.trainer.served_weights import check_as_served

from . import measures
from .arms import DEFAULT, Arm
from .fetch import fetch
from .report import Line, interval
from .served_gap import answers_folder
from .served_trainers import SERVED, logprobs, trainer
from .serving import ArmServer


def _kept(name: str, *patterns: str) -> Arm:
    options = {"bf16_activations": [f"re:.*{pattern}" for pattern in patterns]}
    return Arm(name, ", ".join(patterns), options=options if patterns else {})


GROUPS = {
    arm.name: arm
    for arm in (
        _kept("none"),
        Arm("all", "all", options={"activations": "bf16"}),
        _kept("gate_up", r"\.gate_up_proj"),
        _kept("qkv", r"\.qkv_proj"),
        _kept("down", r"\.down_proj"),
        _kept("o", r"\.o_proj"),
        _kept("first_10", r"layers\.\d\."),
        _kept("last_10", r"layers\.2\d\."),
        _kept("gate_up_qkv", r"\.gate_up_proj", r"\.qkv_proj"),
        _kept("all_but_o", r"\.gate_up_proj", r"\.qkv_proj", r"\.down_proj"),
        _kept("last_layer", r"layers\.29\."),
    )
}


def measure(
    name: str,
    groups: Sequence[str],
    answers: int,
    threads: int,
    console: Console,
    keep: Callable[[list[Line]], object] = list,
) -> list[Line]:
    """A line for each group, behind one of conditions; `keep` gets them after each.

    Raises:
        Fp8RlError: no such group, no answers of a run of `served-gap`, a server that fails.
    """
    unknown = [group for group in groups if group not in GROUPS]
    if unknown:
        raise ConfigError("--groups", unknown[0], f"known: {', '.join(GROUPS)}", "Choose some.")
    path = answers_folder(name) / f"{DEFAULT}.jsonl"
    if not path.is_file():
        raise ConfigError(
            str(path), "no such file", "a default server's answers", "Run `make served-gap` first."
        )
    rows = [Rollout(**json.loads(row)) for row in path.read_text().splitlines()[:answers]]
    sequences = [(one.prompt_ids, one.output_ids) for one in rows]
    folder = fetch(name, console)
    torch.set_num_threads(threads)
    lines: list[Line] = [
        {
            "kind": "conditions",
            "model": name,
            "trainer": SERVED,
            "answers": len(rows),
            "tokens": sum(len(one.output_ids) for one in rows),
            **measured.versions("sglang", "torch"),
        }
    ]
    trained: list[torch.Tensor] = []
    none: measures.Gap | None = None
    with Progress(console=console) as progress:
        for arm in (GROUPS[group] for group in groups):
            log = answers_folder(name) / f"kept-{arm.name}.log"
            task = progress.add_task(arm.name, total=lines[0]["tokens"])
            with ArmServer(arm, folder, threads, 1, log) as server:
                if not trained:
                    trained = _trained(folder, server.url, rows)
                scored = server.score(sequences, lambda n: progress.advance(task, n))  # noqa: B023
            gap = measures.gap(scored, trained)
            none = none or gap
            lines.append(_line(arm, gap, none))
            keep(lines)
            progress.console.print(f"{arm.name}: k3 {interval(lines[-1]['kl_k3'])}")
    return lines


def _trained(folder: Any, url: str, rows: Sequence[Rollout]) -> list[torch.Tensor]:
    model = load_model(str(folder), "bfloat16", "cpu")
    client = RefitClient(url)
    with trainer(model, SERVED, client.plan()):
        check_as_served(model, client)
        return [one for row in rows for one in logprobs(model, [row])]


def _line(arm: Arm, gap: measures.Gap, first: measures.Gap) -> Line:
    drawn = measures.Resamples(len(gap.log_ratio))
    return {
        "kind": "group",
        "bf16_activations": arm.name,
        "modules": arm.says,
        **measures.means(gap, drawn),
        "to_first": measures.against(gap, first, drawn),
    }
