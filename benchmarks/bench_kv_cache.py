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

import json
import math
import platform
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table
from torch.utils._python_dispatch import TorchDispatchMode

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "engine"))

import kv_commands
from commands import model_of, update
from engine_host import EngineHost
from generation import finish, generate
from host_log import host_log

from sglang_fp8rl.engine.kv_scales.attention_layers import AttentionLayer
from sglang_fp8rl.engine.kv_scales.calibration import Calibration
from sglang_fp8rl.engine.kv_scales.choice import chosen
from sglang_fp8rl.engine.kv_scales.kv_scales import KvScales
from sglang_fp8rl.numerics.kv_bounds import Rotation, Rows
from sglang_fp8rl.platforms.cpu_attention import SWITCH
from sglang_fp8rl.testing.checkpoints import make_config, make_state_dict, save_checkpoint

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
TARGET_S = 0.2  # to choose and to fold, on two cores
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


# -- inside a scheduler ----------------------------------------------------------------------------


def largest(scheduler: Any, prompts: list[list[int]]) -> list[tuple[float, float]]:
    """Per layer the largest key and value that the prompts make, before anything is scaled."""
    found: dict[int, list[float]] = {}

    def around(module: Any) -> Callable[..., Any]:
        def forward(q: Any, k: Any, v: Any, *args: Any, **kw: Any) -> Any:
            seen = found.setdefault(module.layer_id, [0.0, 0.0])
            seen[:] = [max(seen[0], float(k.abs().max())), max(seen[1], float(v.abs().max()))]
            return type(module).forward(module, q, k, v, *args, **kw)

        return forward

    _around_attention(scheduler, around)
    score(scheduler, prompts)
    _around_attention(scheduler, None)
    return [(keys, values) for _, (keys, values) in sorted(found.items())]


def calibrated(scheduler: Any, tokens: list[int]) -> list[tuple[int, int]]:
    """What a server that calibrates with these tokens would choose."""
    kv, source = kv_commands.kv_of(scheduler), Calibration(model_of(scheduler), tokens)
    with kv.unfolded():
        layers = chosen(kv.layers, None, source.largest(kv.layers), source.room)
    return [one.exponents for one in layers]


def center(scheduler: Any, prompts: list[list[int]]) -> None:
    """From now on the mean key that these prompts make, by head and channel, is taken off every key."""
    seen: dict[int, list[torch.Tensor]] = {}

    def watching(module: Any) -> Callable[..., Any]:
        def forward(q: Any, k: Any, v: Any, *args: Any, **kw: Any) -> Any:
            seen.setdefault(module.layer_id, []).append(k.flatten(1).float())
            return type(module).forward(module, q, k, v, *args, **kw)

        return forward

    _around_attention(scheduler, watching)
    score(scheduler, prompts)
    means = {number: torch.cat(rows).mean(0) for number, rows in seen.items()}

    def without(module: Any) -> Callable[..., Any]:
        def forward(q: Any, k: Any, v: Any, *args: Any, **kw: Any) -> Any:
            k = (k.flatten(1).float() - means[module.layer_id]).to(k.dtype).view(k.shape)
            return type(module).forward(module, q, k, v, *args, **kw)

        return forward

    _around_attention(scheduler, without)


def scale_exactly(scheduler: Any, scales: list[tuple[float, float]] | None) -> None:
    """SGLang's own scales, as a reference: what is stored is divided, in BF16."""

    def around(module: Any) -> Callable[..., Any]:
        assert scales is not None
        a, b = scales[module.layer_id]

        def forward(q: Any, k: Any, v: Any, *args: Any, **kw: Any) -> Any:
            return type(module).forward(module, q * a, k / a, v / b, *args, **kw) * b

        return forward

    _around_attention(scheduler, around if scales else None)


def _around_attention(scheduler: Any, around: Callable[[Any], Any] | None) -> None:
    from sglang.srt.layers.radix_attention import RadixAttention

    for module in model_of(scheduler).modules():
        if isinstance(module, RadixAttention):
            vars(module).pop("forward", None)
            if around is not None:
                module.forward = around(module)


def fold(scheduler: Any, exponents: list[tuple[int, int]]) -> None:
    from sglang_fp8rl.engine.kv_scales.choice import LayerChoice, Side

    kv_commands.kv_of(scheduler)._adopt([LayerChoice(Side(a), Side(b)) for a, b in exponents])


def score(scheduler: Any, prompts: list[list[int]]) -> list[float]:
    """Log-probabilities of the prompts' tokens."""
    assert scheduler.flush_cache()
    return [value for prompt in prompts for value in generate(scheduler, prompt, 1)[1][:-1]]


def bytes_per_token(scheduler: Any) -> float:
    pool = scheduler.tp_worker.model_runner.token_to_kv_pool
    sizes = [buffer.nbytes for buffer in (*pool.k_buffer, *pool.v_buffer)]
    return sum(sizes) / len(pool.k_buffer[0])


def decode_operations(scheduler: Any) -> dict[str, int]:
    """What torch dispatches in the decode steps of one request."""
    counted: Counter[str] = Counter()

    class Count(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            counted[str(function)] += 1
            return function(*args, **(kwargs or {}))

    kv_commands.start_request(scheduler, list(range(9, 29)))
    with Count():
        kv_commands.step(scheduler)
    finish(scheduler)
    return dict(counted)


# -- what is compared ------------------------------------------------------------------------------


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
            EngineHost(path, args=kv_commands.FP8_CACHE, env={SWITCH: "1"}) as fp8_q,
            EngineHost(path) as bf16,
        ):
            facts = {
                "bytes_per_token": fp8.call(bytes_per_token),
                "bytes_per_token_bf16": bf16.call(bytes_per_token),
            }
            operations = fp8.call(decode_operations)
            fp8.call(fold, [(0, 0)] * LAYERS)
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
                        host.call(fold, folded.get(rule, [(0, 0)] * LAYERS))
                    if rule == "amax * 1.05":
                        scales = [tuple(1.05 * one / 448 for one in layer) for layer in seen]
                        host.call(scale_exactly, scales)
                    elif rule == "K - mean":
                        host.call(center, others)
                    found = torch.tensor(host.call(score, prompts))
                    host.call(scale_exactly, None)
                    rows.append({"case": case, "rule": rule, **_errors(found, exact)})
                    console.print(rows[-1], highlight=False)
    return rows, facts


def _send(host: EngineHost, weights: State) -> None:
    taken, message = host.call(update, list(weights.items()))
    assert taken, message


def _errors(found: torch.Tensor, exact: torch.Tensor) -> dict[str, float]:
    difference = found.double() - exact.double()
    ratio = -difference
    return {
        "mean_abs_dlogp": float(difference.abs().mean()),
        "k3": float((ratio.exp() - 1 - ratio).mean()),
    }


def layers_of(name: str) -> list[AttentionLayer]:
    """Attention of an 8B model, each layer in memory of its own; what a choice and a fold touch."""
    count, has_norms = (36, True) if name == "Qwen3-8B" else (32, False)
    hidden, q, kv, head_dim = 4096, 4096, 1024, 128
    draw = torch.Generator().manual_seed(0)
    found = []
    for number in range(count):
        codes = torch.randint(0, 256, (q + 2 * kv, hidden), dtype=torch.uint8, generator=draw)
        codes[(codes & 0x7F) == 0x7F] = 0
        weight = codes.view(torch.float8_e4m3fn)
        scale = torch.rand((q + 2 * kv) // 128, hidden // 128, generator=draw) / 1000 + 1e-5
        out = torch.rand(hidden // 128, q // 128, generator=draw) / 1000 + 1e-5
        norm = torch.rand(hidden, generator=draw).bfloat16() + 0.5
        heads = [torch.rand(head_dim, generator=draw).bfloat16() + 0.5 for _ in range(2)]
        at = [slice(0, q // 128), slice(q // 128, (q + kv) // 128), slice((q + kv) // 128, None)]
        found.append(
            AttentionLayer(
                f"layer {number}",
                number,
                keys_down=(heads[0] if has_norms else scale[at[1]],),
                queries_up=(heads[1] if has_norms else scale[at[0]],),
                values_down=(scale[at[2]],),
                output_up=(out,),
                input_norm=norm,
                key_norm=heads[0] if has_norms else None,
                key_rows=Rows(weight[q : q + kv], scale[at[1]]),
                value_rows=Rows(weight[q + kv :], scale[at[2]]),
                rotation=Rotation(head_dim, head_dim, True),
            )
        )
    return found


def measure_times(repetitions: int) -> list[dict[str, Any]]:
    rows = []
    for name in ("Qwen3-8B", "Llama-3.1-8B"):
        layers = layers_of(name)
        kv = KvScales("certified", lambda: None)
        kv.start(layers, None)
        assert any(one.exponents != (0, 0) for one in kv.chosen)
        choose, fold_back, both, cpu = [], [], [], []
        for _ in range(repetitions):
            started, cpu_started = time.perf_counter(), time.process_time()
            chosen(layers, None)
            found_at = time.perf_counter()
            with kv.unfolded():
                pass
            choose.append(found_at - started)
            fold_back.append(time.perf_counter() - found_at)
            both.append(time.perf_counter() - started)
            cpu.append(time.process_time() - cpu_started)  # of all threads
        rows.append(
            {
                "model": name,
                "choose_s": statistics.median(choose),
                "unfold_and_fold_s": statistics.median(fold_back),
                "choose_and_fold_s": statistics.median(both),
                "choose_and_fold_cpu_s": statistics.median(cpu),
                "target_s": TARGET_S,
                "threads": torch.get_num_threads(),
            }
        )
    return rows


def main(
    json_path: Annotated[Path | None, typer.Option("--json", help="Append JSON lines.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Write a picture.")] = None,
    repetitions: int = 15,
    only_times: Annotated[bool, typer.Option(help="Serve no model.")] = False,
) -> None:
    """Print both tables."""
    from importlib.metadata import version

    errors: list[dict[str, Any]] = []
    facts: dict[str, Any] = {}
    with host_log("bench-kv-cache") as console:
        times = measure_times(repetitions)
        _show_times(console, times)
        if not only_times:
            errors, facts = measure_errors(console)
            _show(console, errors, facts)
    conditions = {
        "sglang": version("sglang"),
        "torch": torch.__version__,
        "cpu": platform.processor() or platform.machine(),
    }
    if json_path is not None:
        with json_path.open("a") as file:
            for row in [*errors, *times, *([facts] if facts else [])]:
                file.write(json.dumps({**row, **conditions}) + "\n")
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
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axis = plt.subplots(figsize=(9, 4.5), constrained_layout=True)
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
    plt.close(figure)


if __name__ == "__main__":
    typer.run(main)
