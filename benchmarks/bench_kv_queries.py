"""What the keys' exponent does to FP8 queries behind a norm of their own (Qwen3).

    python benchmarks/bench_kv_queries.py [--json FILE]

The fold takes keys to the top of e4m3, and queries down by as much. A seeded Qwen3 of four layers, norms with
gains around one, runs on a CPU engine with queries and probabilities in e4m3, as FlashAttention-3 has them.
Each row moves the exponent of the keys away from the certified one and compares log-probabilities of the same
prompts with those of a BF16 cache: mean |Δ log p| and k3. Beside it: how much of queries and of keys lies
below e4m3's normal numbers as they reach attention.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

import measured
from bench_kv_cache import LAYERS, VOCABULARY
from host_log import host_log
from kv_cache.cpu_attention import ON
from kv_cache.in_engine import around_attention, errors_of, score
from support.engine import kv_commands
from support.engine.engine_host import EngineHost

from sglang_fp8rl.lab.testing.checkpoints import make_config, make_state_dict, save_checkpoint

MOVED = (-2, 0, 2, 5, 8)  # binades above the certified exponent
SMALLEST_NORMAL = 2.0**-6


def score_and_count(
    scheduler: Any, prompts: list[list[int]]
) -> tuple[list[float], dict[str, float]]:
    """As `score`, and the shares of queries and of keys that are not normal in e4m3."""
    seen: dict[str, list[int]] = {"queries": [0, 0], "keys": [0, 0]}

    def around(module: Any) -> Callable[..., Any]:
        def forward(q: Any, k: Any, v: Any, *args: Any, **kw: Any) -> Any:
            for counts, one in zip(seen.values(), (q, k), strict=True):
                counts[0] += one.numel()
                counts[1] += int((one.abs() < SMALLEST_NORMAL).sum())
            return type(module).forward(module, q, k, v, *args, **kw)

        return forward

    around_attention(scheduler, around)
    found = score(scheduler, prompts)
    around_attention(scheduler, None)
    shares = {f"subnormal_{name}": below / count for name, (count, below) in seen.items()}
    return found, shares


def main(
    json_path: Annotated[Path | None, typer.Option("--json", help="Append JSON lines.")] = None,
) -> None:
    """Print the rows."""
    config = make_config(
        "qwen3",
        num_hidden_layers=LAYERS,
        hidden_size=256,
        intermediate_size=512,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        vocab_size=VOCABULARY,
    )
    draw = torch.Generator().manual_seed(7)
    prompts = torch.randint(3, VOCABULARY, (6, 64), generator=draw).tolist()
    with tempfile.TemporaryDirectory() as directory, host_log("bench-kv-queries") as console:
        path = save_checkpoint(Path(directory) / "model", config, make_state_dict(config, seed=0))
        with EngineHost(path) as bf16:
            exact = torch.tensor(bf16.call(score, prompts))
        with EngineHost(path, args=kv_commands.FP8_CACHE, env=ON) as host:
            certified = host.call(kv_commands.exponents)
            for moved in MOVED:
                exponents = [(keys + moved, values) for keys, values in certified]
                host.call(kv_commands.fold, exponents)
                found, shares = host.call(score_and_count, prompts)
                row = {
                    "model": "qwen3",
                    "moved": moved,
                    "exponents_of_keys": [keys for keys, _ in exponents],
                    **errors_of(torch.tensor(found), exact),
                    **shares,
                    **measured.versions("sglang", "torch"),
                }
                console.print(row, highlight=False)
                measured.append(json_path, [row])


if __name__ == "__main__":
    typer.run(main)
