"""A small Llama whose modules are blockwise and per channel, and its plan, made without SGLang."""

from __future__ import annotations

import functools
import re
from typing import Any

import torch

from sglang_fp8rl.lab.testing.checkpoints import make_state_dict
from sglang_fp8rl.lab.testing.families import hub_shapes, make_config
from sglang_fp8rl.scheme import decide_scheme, expert_misalignment, misalignment, module_rows
from sglang_fp8rl.wire.plan import RefitPlan
from support.plans import plan_with

_PARTS = dict.fromkeys(("q_proj", "k_proj", "v_proj"), "qkv_proj")
_PARTS |= dict.fromkeys(("gate_proj", "up_proj"), "gate_up_proj")
_LINEAR = re.compile(r"(.*)\.(q|k|v|o|gate|up|down)_proj\.weight")
_EXPERT = re.compile(r"(.*\.experts)\.\d+\.\w+\.weight")
PROMPTS = [[5, 9, 2], [7, 1, 1, 40, 3], [60], [11, 12, 13, 14], [3, 3], [50, 49, 48]]


@functools.cache
def small_config(family: str = "llama") -> Any:
    """Two layers; K and V have 64 rows each, so QKV falls back per channel and the rest is blockwise."""
    return make_config(
        family,
        hidden_size=128,
        intermediate_size=256,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=64,
        vocab_size=64,
        num_hidden_layers=3,
        **({"moe_intermediate_size": 128} if family == "qwen3_moe" else {}),
    )


def small_weights(family: str = "llama", seed: int = 0) -> dict[str, torch.Tensor]:
    """FP32 values that BF16 holds, by their names in a checkpoint."""
    weights = make_state_dict(small_config(family), seed=seed)
    return {name: value.bfloat16().float() for name, value in weights.items()}


def small_plan(family: str = "llama", **options: Any) -> RefitPlan:
    """As the server's at TP 1, by the package's own rule; fused modules decide together."""
    shapes = hub_shapes(small_config(family))
    fused: dict[str, list[str]] = {}
    for name in shapes:
        found, expert = _LINEAR.fullmatch(name), _EXPERT.fullmatch(name)
        if expert:
            fused.setdefault(expert.group(1), []).append(name)
        elif found:
            leaf = f"{found.group(2)}_proj"
            fused.setdefault(f"{found.group(1)}.{_PARTS.get(leaf, leaf)}", []).append(name)
    modules, tensors = [], {}
    for module, names in fused.items():
        scheme = _scheme(module, [shapes[name] for name in names])
        modules += module_rows({module: scheme})
        for name in names:
            is_block = scheme.name == "blockwise"
            block = [128, 128] if is_block else [1, shapes[name][-1]]
            tensors[name] = _entry(shapes[name], module, scheme.name, block)
    for name, shape in shapes.items():
        tensors.setdefault(name, _entry(shape, name.rpartition(".")[0], "high_precision", None))
    model = {
        "architecture": "Small",
        "model_type": family,
        "num_hidden_layers": 3,
        "hidden_size": 128,
        "vocab_size": 64,
    }
    options = {"ignored_layers": [], **options}
    return plan_with(options, model=model, modules=modules, tensors=tensors)


def small_model(weights: dict[str, torch.Tensor], family: str = "llama", tmp: Any = None) -> Any:
    """The `transformers` model with these weights, in FP32."""
    from transformers import AutoModelForCausalLM

    from sglang_fp8rl.lab.testing.checkpoints import save_checkpoint

    save_checkpoint(tmp, small_config(family), weights)
    return AutoModelForCausalLM.from_pretrained(tmp, dtype=torch.float32).eval()


def _scheme(module: str, shapes: list[tuple[int, ...]]) -> Any:
    if module.endswith("experts"):
        why = expert_misalignment(
            hidden_size=128, intermediate_size_per_partition=128, block_size=(128, 128)
        )
        return decide_scheme(why, "per_channel", "blockwise")
    rows, columns = [shape[0] for shape in shapes], shapes[0][1]
    why = misalignment(
        input_size=columns,
        input_size_per_partition=columns,
        output_size=sum(rows),
        output_partition_sizes=rows,
        block_size=(128, 128),
    )
    return decide_scheme(why, "per_channel", "blockwise")


def _entry(shape: Any, module: str, scheme: str, block: list[int] | None) -> dict[str, Any]:
    return {
        "shape": list(shape),
        "module": module,
        "scheme": scheme,
        "block_size": block,
        "reason": "",
        "wire": {"dtype": "bfloat16"},
    }
