"""What an FP8 KV cache costs in log-probabilities, by the rule that scales it, and what the scales cost.

    python benchmarks/bench_kv_cache.py [--json FILE] [--plot FILE] [--only-times]

One seeded Qwen2 (biases, no norms behind the projections) of four layers on two real CPU engines, one with a
BF16 cache. Every case changes the weights and not the function: values down and `o_proj` up, keys up and
queries down; the last ones give K a constant bias in its slowest channels instead. For each case and rule the
log-probabilities of the same prompts are compared with those of the BF16 cache on the same weights: mean
|Δ log p| and the k3 estimate of the KL divergence.

- `unit`: SGLang's FP8 cache without scales
- `certified`: this package, from the weights
- `calibrated`: this package, from the largest value on other prompts, one binade of room
- `amax * 1.05`: the largest value times 1.05 over 448, no power of two (NeMo-RL's rule), around attention
- `K - mean`: without scales, the mean key of other prompts subtracted before the store (K centering)
- `... FP8 q`: as the first two, with queries and probabilities in e4m3 as FlashAttention-3 has them
- `no bias`: a BF16 cache, and the bias of the slow channels left out of the weights: what it would cost to
  take it out before the rotation instead

Then the time to choose and to fold exponents for the attention layers of 8B models, bytes of a token in the
cache, and operations of a decode step with and without scales, counted as torch dispatches them.
"""

from __future__ import annotations

import math
import platform
import sys
import tempfile
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

import measured
from host_log import host_log
from kv_cache.choice_time import measure_times
from kv_cache.cpu_attention import ON
from kv_cache.in_engine import (
    bytes_per_token,
    calibrated,
    center,
    decode_operations,
    errors_of,
    largest,
    scale_exactly,
    score,
)
from support.engine import kv_commands
from support.engine.commands import update
from support.engine.engine_host import EngineHost

from sglang_fp8rl.lab.testing.checkpoints import make_config, make_state_dict, save_checkpoint

LAYERS, HIDDEN, HEADS, KV_HEADS, HEAD_DIM, VOCABULARY = 4, 256, 4, 2, 64, 512
RULES = (
    "unit",
    "certified",
    "calibrated",
    "amax * 1.05",
    "K - mean",
    "unit, FP8 q",
    "certified, FP8 q",
    "no bias",
)
CASES = ("undrifted", "V / 2^8", "V / 2^11", "K * 2^7", "K * 2^12", "K bias 30", "K bias 100")
State = dict[str, torch.Tensor]


def drifted(weights: State, case: str) -> State:
    """Weights of the same function with other keys or values; for a bias another function."""
    kind, amount = case[0], case.split()[-1]
    result = dict(weights)
    if "bias" in case:
        slow = torch.arange(KV_HEADS * HEAD_DIM) % (HEAD_DIM // 2) >= HEAD_DIM // 2 - 8
        for name, bias in weights.items():
            if name.endswith("k_proj.bias"):
                result[name] = bias + float(amount) * slow
    elif case != "undrifted":
        sign = -1 if "/" in case else 1
        factor = 2.0 ** (sign * int(amount.removeprefix("2^")))
        down, up = ("v_proj", "o_proj") if kind == "V" else ("k_proj", "q_proj")
        for name, tensor in weights.items():
            if f".{down}." in name:
                result[name] = tensor * factor
            elif f".{up}." in name:
                result[name] = tensor / factor
    return result


def measure_errors(console: Console) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    config = make_config(
        "qwen2",
        num_hidden_layers=LAYERS,
        hidden_size=HIDDEN,
        intermediate_size=512,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        vocab_size=VOCABULARY,
    )
    weights = make_state_dict(config, seed=0)
    draw = torch.Generator().manual_seed(7)
    texts = torch.randint(3, VOCABULARY, (9, 64), generator=draw).tolist()
    prompts, others = texts[:6], texts[6:]
    rows = []
    with tempfile.TemporaryDirectory() as directory:
        path = save_checkpoint(Path(directory) / "model", config, weights)
        with (
            EngineHost(path, args=kv_commands.FP8_CACHE) as fp8,
            EngineHost(path, args=kv_commands.FP8_CACHE, env=ON) as fp8_q,
            EngineHost(path) as bf16,
        ):
            facts = {
                "bytes_per_token": fp8.call(bytes_per_token),
                "bytes_per_token_bf16": bf16.call(bytes_per_token),
            }
            operations = fp8.call(decode_operations)
            fp8.call(kv_commands.fold, [(0, 0)] * LAYERS)
            without = fp8.call(decode_operations)
            facts["decode_operations"] = sum(operations.values())
            facts["decode_operations_added"] = sum(operations.values()) - sum(without.values())
            for case in CASES:
                for host in (fp8, fp8_q, bf16):
                    _send(host, drifted(weights, case))
                exact = torch.tensor(bf16.call(score, prompts))
                seen = bf16.call(largest, others)
                folded = {
                    "certified": fp8.call(kv_commands.exponents),
                    "calibrated": fp8.call(
                        calibrated, [token for text in others for token in text]
                    ),
                }
                folded["certified, FP8 q"] = folded["certified"]
                for rule in RULES:
                    if rule == "no bias":
                        if "bias" not in case:
                            continue
                        _send(bf16, weights)
                        host = bf16
                    else:
                        host = fp8_q if rule.endswith("FP8 q") else fp8
                        host.call(kv_commands.fold, folded.get(rule, [(0, 0)] * LAYERS))
                    if rule == "amax * 1.05":
                        scales = [tuple(1.05 * one / 448 for one in layer) for layer in seen]
                        host.call(scale_exactly, scales)
                    elif rule == "K - mean":
                        host.call(center, others)
                    found = torch.tensor(host.call(score, prompts))
                    host.call(scale_exactly, None)
                    rows.append({"case": case, "rule": rule, **errors_of(found, exact)})
                    console.print(rows[-1], highlight=False)
    return rows, facts


def _send(host: EngineHost, weights: State) -> None:
    taken, message = host.call(update, list(weights.items()))
    assert taken, message


def main(
    json_path: Annotated[Path | None, typer.Option("--json", help="Append JSON lines.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Write a picture.")] = None,
    repetitions: int = 15,
    only_times: Annotated[bool, typer.Option(help="Serve no model.")] = False,
) -> None:
    """Print both tables."""
    errors: list[dict[str, Any]] = []
    facts: dict[str, Any] = {}
    with host_log("bench-kv-cache") as console:
        times = measure_times(repetitions)
        _show_times(console, times)
        if not only_times:
            errors, facts = measure_errors(console)
            _show(console, errors, facts)
    conditions = measured.versions("sglang", "torch")
    conditions["cpu"] = platform.processor() or platform.machine()
    measured.append(json_path, [*errors, *times, *([facts] if facts else [])], **conditions)
    if plot is not None and errors:
        draw(errors, plot)


def _show_times(console: Console, times: list[dict[str, Any]]) -> None:
    for row in times:
        console.print(
            f"{row['model']}: choose {row['choose_s'] * 1e3:.1f} ms, "
            f"unfold and fold {row['unfold_and_fold_s'] * 1e3:.1f} ms, together "
            f"{row['choose_and_fold_s'] * 1e3:.1f} of {row['target_s'] * 1e3:.0f} ms "
            f"({row['choose_and_fold_cpu_s'] * 1e3:.1f} ms of CPU time), {row['threads']} threads"
        )


def _show(console: Console, errors: list[dict[str, Any]], facts: dict[str, Any]) -> None:
    table = Table("case", *RULES, title="mean |Δ log p| against a BF16 cache (k3)")
    for case in CASES:
        found = {row["rule"]: row for row in errors if row["case"] == case}
        cells = [
            f"{found[r]['mean_abs_dlogp']:.4f} ({found[r]['k3']:.1e})" if r in found else "–"
            for r in RULES
        ]
        table.add_row(case, *cells)
    console.print(table)
    ratio = facts["bytes_per_token_bf16"] / facts["bytes_per_token"]
    console.print(f"tokens per GB: {ratio:.2f} x BF16")
    console.print(
        f"a decode step: {facts['decode_operations']} operations, "
        f"{facts['decode_operations_added']} more than without scales"
    )


def draw(errors: list[dict[str, Any]], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4.5), layout="constrained")
    axis = figure.subplots()
    for number, rule in enumerate(RULES):
        found = {row["case"]: row["mean_abs_dlogp"] for row in errors if row["rule"] == rule}
        middle, width = (len(RULES) - 1) / 2, 0.85 / len(RULES)
        at = [index + (number - middle) * width for index in range(len(CASES))]
        known = [found.get(case, 0.0) for case in CASES]
        heights = [one if math.isfinite(one) else math.nan for one in known]
        axis.bar(at, heights, width * 0.9, label=rule)
        for place, height in zip(at, heights, strict=True):
            if math.isnan(height):
                axis.annotate("NaN", (place, axis.get_ylim()[0]), ha="center", rotation=90)
    axis.set(
        xticks=range(len(CASES)),
        xticklabels=CASES,
        yscale="log",
        ylabel="mean |Δ log p|",
        title="FP8 against BF16 KV cache, 4-layer Qwen2, SGLang on the CPU reference platform",
    )
    axis.legend(fontsize=8)
    axis.grid(alpha=0.3, axis="y")
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    typer.run(main)
