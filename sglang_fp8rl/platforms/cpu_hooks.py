"""SGLang on a CPU: what has to be hooked, why, and when each hook can go."""

from __future__ import annotations


def register_cpu_hooks() -> None:
    import torch

    torch.multiprocessing.set_sharing_strategy("file_system")
