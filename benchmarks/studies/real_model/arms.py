"""The ways of serving that are compared."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from sglang_fp8rl.errors import ConfigError

BASELINE, DEFAULT = "bf16", "fp8_blockwise"


@dataclass(frozen=True)
class Arm:
    """One server.

    Attributes:
        quantized: whether it runs with this package's quantization method.
        options: of the method.
        args: more flags of the server.
        env: more variables of its environment.
        says: what differs from the default, for the table.
    """

    name: str
    says: str
    quantized: bool = True
    options: Mapping[str, Any] = field(default_factory=dict)
    args: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)


def _without(pattern: str) -> dict[str, Any]:
    return {"ignored_layers": [f"re:.*{pattern}"]}


ARMS = {
    arm.name: arm
    for arm in (
        Arm(BASELINE, "no quantization", quantized=False),
        Arm(DEFAULT, "the default"),
        Arm("fp8_per_channel", "one scale a row", options={"granularity": "per_channel"}),
        Arm("fp8_direct", "FP32 to FP8 without BF16", options={"round_to_bf16": False}),
        Arm("fp8_pow2", "weight scales 2^n", options={"use_weight_pow2_scale": True}),
        Arm("fp8_weights_only", "activations stay BF16", options={"activations": "bf16"}),
        Arm("fp8_kv_cache", "KV cache in e4m3 too", args=("--kv-cache-dtype=fp8_e4m3",)),
        Arm("without_down", "down_proj in BF16", options=_without(r"\.down_proj")),
        Arm("without_gate_up", "gate_up_proj in BF16", options=_without(r"\.gate_up_proj")),
        Arm("without_o", "o_proj in BF16", options=_without(r"\.o_proj")),
        Arm("without_qkv", "qkv_proj in BF16", options=_without(r"\.qkv_proj")),
        Arm(
            "without_ends",
            "first 2 and last 2 layers in BF16",
            options={"num_first_layers_in_bf16": 2, "num_last_layers_in_bf16": 2},
        ),
    )
}


def with_exemptions(ignored_layers: Sequence[str]) -> Arm:
    """What `sglang-fp8rl sensitivity` chose, stays in BF16."""
    options = {"ignored_layers": list(ignored_layers)}
    return Arm("fp8_chosen", f"{len(ignored_layers)} chosen modules in BF16", options=options)


def chosen(names: str | None, ignored_layers: Sequence[str] = ()) -> list[Arm]:
    """The arms of a comma-separated list, the baseline always among them and first.

    Args:
        ignored_layers: of one arm more, `fp8_chosen`, the last.

    Raises:
        ConfigError: there is no such arm.
    """
    wanted = list(ARMS) if names is None else [name.strip() for name in names.split(",")]
    unknown = [name for name in wanted if name not in ARMS]
    if unknown:
        raise ConfigError("--arms", repr(unknown[0]), f"known: {', '.join(ARMS)}", "Choose some.")
    arms = [arm for name, arm in ARMS.items() if name == BASELINE or name in wanted]
    return [*arms, with_exemptions(ignored_layers)] if ignored_layers else arms
