"""How long exponents take, for the attention layers of 8B models."""

from __future__ import annotations

import functools
import statistics
import time
from typing import Any

import torch
import torch.distributed as dist

from sglang_fp8rl.engine.kv_scales.attention_layers import AttentionLayer, Fold
from sglang_fp8rl.engine.kv_scales.choice import chosen, exponents_of, table_of
from sglang_fp8rl.numerics.kv_bounds import Rotation, Rows

TARGET_S = 0.2  # to choose and to fold, on two cores


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
                down=((heads[0] if has_norms else scale[at[1]],), (scale[at[2]],)),
                up=((heads[1] if has_norms else scale[at[0]],), (out,)),
                input_norm=norm,
                key_norm=heads[0] if has_norms else None,
                key_rows=Rows(weight[q : q + kv], scale[at[1]]),
                value_rows=Rows(weight[q + kv :], scale[at[2]]),
                rotation=Rotation(head_dim, head_dim, True),
            )
        )
    return found


def measure_times(repetitions: int) -> list[dict[str, Any]]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    rows = []
    for name in ("Qwen3-8B", "Llama-3.1-8B"):
        layers = layers_of(name)
        fold, read = Fold(layers), functools.partial(table_of, layers)
        fold.change(exponents_of(chosen(dist.group.WORLD, read, None)))
        assert fold.exponents.any()
        choose, fold_back, both, cpu = [], [], [], []
        for _ in range(repetitions):
            started, cpu_started = time.perf_counter(), time.process_time()
            chosen(dist.group.WORLD, read, None)
            found_at = time.perf_counter()
            with fold.unfolded():
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
