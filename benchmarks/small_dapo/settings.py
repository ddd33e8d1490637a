"""What a run is made of: arms, sizes, and DAPO's constants."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Arm:
    """How rollouts are served, and how weights get there.

    Attributes:
        sender: `full`: FP32 masters. `quantized`: FP8 and scales made by the trainer.
            (See `refit.py`.)
        quantized_server: whether the server runs with this package's quantization method.
        options: of the method.
        server_args: more flags of the server.
        tis: whether the trainer corrects for the rollout's probabilities.
        served: whether the trainer computes with the weights as they are served.
        nudged: one weight of the start is one step of BF16 larger, so that the run leaves the trajectory of its
            twin: what differs at the end is what rounding alone makes.
    """

    name: str
    sender: str = "full"
    quantized_server: bool = True
    options: Mapping[str, Any] = field(default_factory=dict)
    server_args: tuple[str, ...] = ()
    tis: bool = True
    served: bool = False
    nudged: bool = False


_FP8_CACHE = ("--kv-cache-dtype=fp8_e4m3",)
ARMS = {
    arm.name: arm
    for arm in (
        Arm("bf16", quantized_server=False),
        Arm("fp8_blockwise"),
        Arm("fp8_blockwise_nudged", nudged=True),
        Arm("fp8_blockwise_served", served=True),
        Arm("fp8_direct", options={"round_to_bf16": False}),
        Arm("fp8_per_channel", options={"granularity": "per_channel"}),
        Arm("quantized_before_transfer", sender="quantized"),
        Arm("fp8_kv_cache", server_args=_FP8_CACHE),
        Arm("fp8_kv_cache_without_tis", server_args=_FP8_CACHE, tis=False),
    )
}


@dataclass(frozen=True)
class Settings:
    """Sizes and constants; the same for every arm. DAPO's own values unless said otherwise.

    Attributes:
        prompts, samples: a generation batch is `prompts` × `samples` responses.
        train_prompts: groups trained on each step, the first that are neither all right nor all
            wrong (dynamic sampling); up to `max_generations` batches are generated to find them.
        minibatches: optimizer updates per step, all on the log-probabilities of its start.
        clip_low, clip_high: clip-higher, 0.2 and 0.28.
        tis_cap: of token-level truncated importance sampling; None to do without it.
        learning_rate: AdamW without decay. The paper's 1e-6 is for 32 billion parameters.
        warmup_updates: over which the learning rate rises linearly.
        validation: held-out problems answered greedily by the served model after each step.
        start_accuracy: where the supervised start ends: partly right, so that RL has work to do.
    """

    prompts: int = 32
    samples: int = 8
    train_prompts: int = 16
    max_generations: int = 2
    minibatches: int = 2
    clip_low: float = 0.2
    clip_high: float = 0.28
    tis_cap: float | None = 2.0
    learning_rate: float = 1e-4
    warmup_updates: int = 10
    max_grad_norm: float = 1.0
    validation: int = 128
    hidden_size: int = 256
    intermediate_size: int = 1024
    layers: int = 2
    start_accuracy: float = 0.3
    start_max_steps: int = 3000
    start_batch: int = 128
    start_learning_rate: float = 1e-3
