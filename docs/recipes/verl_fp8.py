"""veRL's own trainer with its rollout in FP8: GRPO or DAPO, with and without an actor that computes as served.

    python docs/recipes/verl_fp8.py grpo actor_rollout_ref.model.path=MODEL data.train_files=F data.val_files=F …
    python docs/recipes/verl_fp8.py dapo --served actor_rollout_ref.model.path=MODEL …

What follows is veRL's own (`verl.trainer.main_ppo`); `verl_grpo.yaml` and `verl_dapo.yaml` beside this file are
what it starts from. `--served` writes the plan of the rollout servers first, and names the actor that trains
with the weights that they serve.

Tried: veRL 0.9.1 with SGLang 0.5.23 on a CPU: its trainer, with either file, small sizes and two steps (README.md
beside this). Not tried: these sizes, on a GPU; several servers.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from needs import THIS_PACKAGE, need

PATH, RANKS = "actor_rollout_ref.model.path", "actor_rollout_ref.rollout.tensor_model_parallel_size"
ACTOR = "actor_rollout_ref.model.external_lib=sglang_fp8rl.verl_rollout.served_actor"
USAGE = f"usage: verl_fp8.py grpo|dapo [--served] {PATH}=MODEL [OVERRIDES OF VERL …]"


def command(algorithm: str, overrides: list[str]) -> list[str]:
    """What runs veRL with the recipe of that name."""
    recipes = ["--config-dir", str(Path(__file__).parent.resolve())]
    start = [sys.executable, "-m", "verl.trainer.main_ppo", *recipes]
    return [*start, "--config-name", f"verl_{algorithm}", *overrides]


def write_plan(overrides: list[str]) -> Path:
    """The plan of the servers that veRL will start. They serve in BF16; 2 ranks are veRL's default."""
    from sglang_fp8rl.lab.plan_offline import make_plan

    said = dict(one.split("=", 1) for one in overrides if "=" in one)
    made = make_plan(said[PATH], tp_size=int(said.get(RANKS, 2)), dtype="bfloat16")
    file = Path("plan.json").resolve()
    file.write_text(json.dumps(made.document))
    return file


def main(arguments: list[str]) -> None:
    """Check what is installed, and become veRL's trainer."""
    need("sglang_fp8rl", THIS_PACKAGE)
    need(
        "verl",
        "pip install --no-deps verl==0.9.1, and what it imports: constraints/requirements.txt",
    )
    from sglang_fp8rl.compat import check_host
    from sglang_fp8rl.verl_plugin import check_verl

    if problems := [*check_host(), *check_verl()]:
        raise SystemExit("error: " + "; ".join(problems))
    algorithm, *rest = arguments or [""]
    overrides = [one for one in rest if one != "--served"]
    if algorithm not in ("grpo", "dapo") or not any(one.startswith(PATH + "=") for one in rest):
        raise SystemExit(USAGE)
    if "--served" in rest:
        os.environ["SGLANG_FP8RL_SERVED_PLAN"] = str(write_plan(overrides))
        overrides.append(ACTOR)
    sys.stdout.flush()
    os.execv(sys.executable, command(algorithm, overrides))


if __name__ == "__main__":
    main(sys.argv[1:])
