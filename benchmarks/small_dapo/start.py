"""The supervised start: from random weights to a policy that is right some of the time."""

from __future__ import annotations

import hashlib
import json
import random
from pathlib import Path

import torch

from sglang_fp8rl.errors import ConfigError

from .model import Policy
from .settings import Settings
from .task import draw_problems

_CHECK_EVERY = 10
_CHECK_PROBLEMS = 256
_START_FIELDS = (
    "hidden_size",
    "intermediate_size",
    "layers",
    "start_accuracy",
    "start_max_steps",
    "start_batch",
    "start_learning_rate",
)


def supervised_start(settings: Settings, seed: int, cache: Path) -> dict[str, torch.Tensor]:
    """FP32 weights of one seed, trained or read from `cache`; every arm of the seed starts here.

    Imitates demonstrations until the chance of a right answer, averaged over held-out problems,
    reaches `settings.start_accuracy`.

    Raises:
        ConfigError: `settings.start_max_steps` were not enough.
    """
    from safetensors.torch import load_file, save_file

    path = cache / f"start-{seed}-{_key(settings)}.safetensors"
    if path.exists():
        return load_file(path)
    policy = Policy.random(settings, seed)
    optimizer = torch.optim.AdamW(
        policy.masters.values(), lr=settings.start_learning_rate, weight_decay=0.0
    )
    draw = random.Random(f"start {seed}")
    held_out = draw_problems(random.Random(f"start check {seed}"), _CHECK_PROBLEMS, held_out=True)
    accuracy = 0.0
    for step in range(settings.start_max_steps):
        problems = draw_problems(draw, settings.start_batch)
        logprobs, mask = policy.logprobs(
            [p.prompt for p in problems], [p.demonstration(draw) for p in problems]
        )
        loss = -logprobs.sum() / mask.sum()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(policy.masters.values(), settings.max_grad_norm)
        optimizer.step()
        if step % _CHECK_EVERY == 0:
            with torch.no_grad():
                checked, used = policy.logprobs(
                    [p.prompt for p in held_out], [p.answer for p in held_out]
                )
            accuracy = (checked * used).sum(1).exp().mean().item()
            if accuracy >= settings.start_accuracy:
                break
    else:
        raise ConfigError(
            "start_max_steps",
            str(settings.start_max_steps),
            f"the start reached {accuracy:.3f} of {settings.start_accuracy}",
            "Allow more steps.",
        )
    state = policy.state_dict()
    cache.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    save_file(state, partial)
    partial.rename(path)
    return state


def _key(settings: Settings) -> str:
    """A short digest of what the start depends on."""
    values = {name: getattr(settings, name) for name in _START_FIELDS}
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:10]
