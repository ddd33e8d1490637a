"""DAPO's dynamic sampling: groups without a difference in reward teach nothing, so others are drawn.

veRL has it inside its trainer's loop, not as a function, so it is here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from .rollout import Group
from .settings import Settings


@dataclass(frozen=True)
class Sampled:
    """What dynamic sampling drew.

    Attributes:
        used: the groups to train on: neither all right nor all wrong.
        drawn: every group that was generated.
    """

    used: list[Group]
    drawn: list[Group]


def dynamic_sampling(generate: Callable[[], list[Group]], settings: Settings) -> Sampled:
    """Generate batches until enough groups have something to teach, or the limit is reached."""
    used: list[Group] = []
    drawn: list[Group] = []
    for _ in range(settings.max_generations):
        batch = generate()
        drawn += batch
        used += [group for group in batch if 0 < sum(group.correct) < len(group.correct)]
        if len(used) >= settings.train_prompts:
            break
    return Sampled(used[: settings.train_prompts], drawn)
