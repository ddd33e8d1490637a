"""Whether a model and what a run keeps of it fit into memory; asked before anything is loaded."""

from __future__ import annotations

import math
from pathlib import Path

from ...errors import ConfigError
from ...wire.plan import RefitPlan

_CGROUP = Path("/sys/fs/cgroup")


def needed_bytes(plan: RefitPlan, *, value_bytes: int, tokens: int, tokens_at_once: int) -> int:
    """An estimate: the weights, what is kept of the clean run, and the largest temporaries.

    Args:
        value_bytes: of a weight as it is computed with (4 in FP32).
        tokens: of all sequences, padding included.
        tokens_at_once: of one batch.
    """
    shapes = [one.shape for one in plan.tensors.values() if one.shape is not None]
    model = plan.document["model"]
    hidden, vocabulary = model["hidden_size"] or 0, model["vocab_size"] or 0
    layers = model["num_hidden_layers"] or 0
    weights = value_bytes * sum(math.prod(shape) for shape in shapes)
    kept = tokens * (value_bytes * hidden * layers + 4 * vocabulary)
    largest = max((math.prod(shape[-2:]) for shape in shapes if len(shape) > 1), default=0)
    # Logits as the model gives them, their log-softmax; one weight quantized and dequantized.
    temporary = tokens_at_once * vocabulary * (value_bytes + 8) + 16 * largest
    return weights + kept + temporary


def free_bytes(device: str) -> int:
    """What this process may still take: of the GPU, or of the machine and its control group.

    Raises:
        ConfigError: torch can't use the device.
    """
    import psutil
    import torch

    if device != "cpu":
        try:
            return torch.cuda.mem_get_info(torch.device(device))[0]
        except (RuntimeError, AssertionError, ValueError) as error:  # torch's for an absent device
            raise ConfigError(
                "--device", f"{device!r}: {error}", "torch can use the device", "Use cpu or cuda."
            ) from error
    free = psutil.virtual_memory().available
    limit, used = _CGROUP / "memory.max", _CGROUP / "memory.current"
    if limit.exists() and used.exists() and limit.read_text().strip() != "max":
        # What is used counts files that can be dropped, so this is a cautious number.
        free = min(free, max(0, int(limit.read_text()) - int(used.read_text())))
    return free


def check_fits(model: str, needed: int, free: int, *, tokens: int, device: str) -> None:
    """Refuse what would end in an out-of-memory kill.

    Raises:
        ConfigError: with both sizes and what would make it fit.
    """
    if needed <= free:
        return
    raise ConfigError(
        model,
        f"{needed / 1e9:.1f} GB are needed for its weights and {tokens} tokens",
        f"{free / 1e9:.1f} GB are free on {device}",
        "Take fewer prompts or --new-tokens, --dtype bfloat16, or a machine or --device with more.",
    )
