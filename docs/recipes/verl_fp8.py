"""veRL's own trainer with its rollout in FP8: GRPO or DAPO, with and without an actor that computes as served.

    python docs/recipes/verl_fp8.py grpo actor_rollout_ref.model.path=MODEL data.train_files=F data.val_files=F …
    python docs/recipes/verl_fp8.py dapo --served actor_rollout_ref.model.path=MODEL …

What follows is veRL's own (`verl.trainer.main_ppo`); `verl_grpo.yaml` and `verl_dapo.yaml` beside this file are
what it starts from. `--served` writes the plan of the rollout servers first, from the same configuration, and
names the actor that trains with the weights that they serve; the first refit compares it with theirs.

Tried: veRL 0.9.1 with SGLang 0.5.23 on a CPU: its trainer, with either file, small sizes and two steps (README.md
beside this). Not tried: these sizes, on a GPU; several servers.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from needs import THIS_PACKAGE, need

METHOD, PATH = "fp8_blockwise_online", "actor_rollout_ref.model.path"
ROLLOUT = "actor_rollout_ref.rollout"
# What a plan made here depends on but can't be told, with the only value that it is right for.
TAKEN = {"quantization": None, "data_parallel_size": 1, "disaggregation.enabled": False}
# Of engine_kwargs.sglang: another model, or one that is split otherwise than by tensors and experts.
NOT_TAKEN = {"model_path", "revision", "model_impl", "dp_size", "pp_size", "attn_cp_size", "moe_dp_size",
             "moe_dense_tp_size", "enable_dp_attention", "enable_dp_lm_head"}  # fmt: skip
ACTOR = "actor_rollout_ref.model.external_lib=sglang_fp8rl.verl_rollout.served_actor"
USAGE = f"usage: verl_fp8.py grpo|dapo [--served] {PATH}=MODEL [OVERRIDES OF VERL …]"


def command(algorithm: str, overrides: list[str]) -> list[str]:
    """What runs veRL with the recipe of that name."""
    recipes = ["--config-dir", str(Path(__file__).parent.resolve())]
    start = [sys.executable, "-m", "verl.trainer.main_ppo", *recipes]
    return [*start, "--config-name", f"verl_{algorithm}", *overrides]


def composed(algorithm: str, overrides: list[str]) -> Any:
    """The configuration that `command` runs veRL with."""
    from hydra import compose, initialize_config_dir

    with initialize_config_dir(str(Path(__file__).parent.resolve()), version_base=None):
        search = "hydra.searchpath=[pkg://verl.trainer.config]"
        return compose(f"verl_{algorithm}", overrides=[search, *overrides])


def servers(config: Any) -> dict[str, Any]:
    """What `make_plan` is told of the servers that veRL will start; leaves where it can't be told."""
    from omegaconf import OmegaConf

    model, rollout = config.actor_rollout_ref.model, config.actor_rollout_ref.rollout
    engine: Any = OmegaConf.to_container(rollout.engine_kwargs, resolve=True)
    engine = engine.get("sglang") or {}
    of_model = json.loads(engine.get("json_model_override_args") or "{}")
    options = of_model.pop("quantization_config", {})
    taken = {name: OmegaConf.select(rollout, name) == only for name, only in TAKEN.items()}
    wrong = [f"{ROLLOUT}.{name}" for name in taken if not taken[name]]
    prefix = f"{ROLLOUT}.engine_kwargs.sglang."
    wrong += [prefix + name for name in engine if name in NOT_TAKEN]
    wrong += [f"{prefix}json_model_override_args: {name}" for name in of_model]
    if engine.get("quantization") != METHOD:
        wrong.append(f"{prefix}quantization (is not {METHOD})")
    if wrong:
        raise SystemExit(
            f"error: --served: {', '.join(wrong)}; the plan that it writes can't say that. Leave it out, or save "
            "GET /fp8rl/plan of such a server and go on by hand: docs/verl.md, Train what is served."
        )
    # As veRL's launcher: an argument of the engine's goes before its own.
    return {
        "model": model.path,
        "tp_size": engine.get("tp_size", rollout.tensor_model_parallel_size),
        "ep_size": engine.get("ep_size", rollout.expert_parallel_size),
        "dtype": engine.get("dtype", rollout.dtype),
        "trust_remote_code": engine.get("trust_remote_code", model.trust_remote_code),
        "options": options,
    }


def write_plan(algorithm: str, overrides: list[str]) -> Path:
    """The plan of the servers that veRL will start."""
    from sglang_fp8rl.lab.plan_offline import make_plan

    made = make_plan(**servers(composed(algorithm, overrides)))
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
    if algorithm not in ("grpo", "dapo") or not any(
        one.lstrip("+").startswith(PATH + "=") for one in rest
    ):
        raise SystemExit(USAGE)
    if "--served" in rest:
        os.environ["SGLANG_FP8RL_SERVED_PLAN"] = str(write_plan(algorithm, overrides))
        overrides.append(ACTOR)
    sys.stdout.flush()
    os.execv(sys.executable, command(algorithm, overrides))


if __name__ == "__main__":
    main(sys.argv[1:])
