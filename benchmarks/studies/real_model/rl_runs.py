"""Every RL run that is asked for and not there yet, a line a step, and a table of what they show."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import Any

import measured
import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from small_dapo import records
from small_dapo.plot import draw

from sglang_fp8rl.errors import ConfigError

from .fetch import fetch
from .models import cache_folder
from .rl import RlArm, RlRun, rl_arms, run_steps
from .sums import encoder_of
from .trainer_side import check_memory

_COPIES = 8.0  # in FP32: masters, gradients, two moments, casts; the server's while it loads
_ENDS = 3  # steps that are averaged at either end


def run_all(
    model: str,
    names: Sequence[str],
    steps: int,
    seeds: int,
    path: Path,
    console: Console,
    *,
    trained_layers: int | None = None,
    ignored_layers: Sequence[str] = (),
    threads: int = 2,
    keep: bool = False,
) -> None:
    """Run what is missing of `names` × `seeds`, and show it.

    Args:
        keep: write each trained policy into its `policy_folder`.

    Raises:
        ConfigError: an unknown arm, or a model that does not fit into memory.
    """
    known = rl_arms(ignored_layers)
    arms = [_arm(known, name) for name in names]
    folder = fetch(model, console)
    check_memory(folder, _COPIES)
    encode = encoder_of(folder)
    torch.set_num_threads(threads)
    old = records.load(path)
    records.keep(path, [key for key in old if len(old[key]) > steps])
    wanted = [(arm, seed) for seed in range(seeds) for arm in arms]
    with Progress(console=console) as progress:
        for arm, seed in wanted:
            if (arm.name, seed) in old and len(old[arm.name, seed]) > steps:
                continue
            task = progress.add_task(f"{arm.name}, seed {seed}", total=steps + 1)
            run = RlRun(
                arm,
                folder,
                encode,
                seed,
                steps,
                threads,
                cache_folder() / "runs",
                trained_layers,
                keep=policy_folder(model, arm.name, seed) if keep else None,
            )
            for record in run_steps(run):
                records.append(path, {"arm": arm.name, "seed": seed, **record})
                progress.advance(task)
    runs = records.load(path)
    console.print(table(runs))
    picture = path.with_suffix(".png")
    draw(runs, picture, f"{model}, sums")
    console.print(f"picture: {picture.name}")


def policy_folder(model: str, arm: str, seed: int) -> Path:
    """Where a run keeps the policy that it has trained."""
    return cache_folder() / "trained" / f"{model}-{arm}-{seed}"


def kept_policy(model: str, arm: str, seed: int) -> Path:
    """Folder of a policy that a run has kept.

    Raises:
        ConfigError: none did.
    """
    folder = policy_folder(model, arm, seed)
    if not folder.is_dir():
        raise ConfigError(
            "--arm",
            f"{arm!r}, seed {seed}",
            "no trained policy was kept",
            "Run `python -m studies.real_model rl --keep` with this arm; a run that is whole is not run again.",
        )
    return folder


def table(runs: dict[tuple[str, int], list[dict[str, Any]]]) -> Table:
    """Accuracy at the start and at the end of each run, and its mean gap."""
    found = measured.table(
        f"sums; ends are means of {_ENDS} steps",
        ("arm", "seed", "steps", "validation", "sampled", "k3 KL", "largest", "s/step"),
    )
    for (arm, seed), lines in runs.items():
        steps = lines[1:]
        validated = [line for line in steps if "val_accuracy" in line]
        if not validated:
            continue
        found.add_row(
            arm,
            str(seed),
            str(len(steps)),
            f"{lines[0]['val_accuracy']:.2f} → {_mean(validated[-_ENDS:], 'val_accuracy'):.2f}",
            f"{_mean(steps[:_ENDS], 'train_accuracy'):.2f} → "
            f"{_mean(steps[-_ENDS:], 'train_accuracy'):.2f}",
            f"{_mean(steps, 'kl_k3'):.2e}",
            f"{max(line['ratio_max'] for line in steps):.2f}",
            f"{_mean(steps, 'step_seconds'):.0f}",
        )
    return found


def _arm(known: dict[str, RlArm], name: str) -> RlArm:
    if name not in known:
        raise ConfigError(
            "--arms",
            repr(name),
            f"known: {', '.join(known)}",
            "fp8_chosen comes with --ignored-layers.",
        )
    return known[name]


def _mean(lines: Sequence[dict[str, Any]], key: str) -> float:
    return mean(line[key] for line in lines)
