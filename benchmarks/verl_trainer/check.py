"""What a run of veRL's trainer has to show, and the bounds it is held to."""

from __future__ import annotations

from statistics import mean

from verl_trainer.trainer_run import RunResult

KL = "rollout_corr/k3_kl"
REWARD = "critic/rewards/mean"
# A run that is right lies between: FP8 differs from BF16, and by no more than its rounding.
FP8_KL = (2e-3, 1e-1)
BF16_KL = (0.0, 2e-3)


def mean_kl(run: RunResult) -> float:
    """Mean over the steps of k3 KL between rollout and trainer, per token."""
    return mean(step[KL] for step in run.metrics if KL in step)


def problems(run: RunResult, steps: int) -> list[str]:
    """What is wrong with a run; of the run with a wrong scale, what should be wrong and is not."""
    found = []
    if run.is_timeout:
        found.append(f"not done after {run.seconds:.0f} s, see {run.log}")
    elif run.returncode:
        found.append(f"exit {run.returncode}, see {run.log}")
    if len(run.metrics) < steps:
        found.append(f"{len(run.metrics)} of {steps} steps")
    if len(run.refits) < steps:
        found.append(f"{len(run.refits)} refits in {steps} steps")
    if run.arm.quantization:
        found += [text for refit in run.refits for text in _refit_problems(refit)]
    if not any(KL in step for step in run.metrics):
        return [*found, f"no {KL} in the metrics"]
    return found + _kl_problems(run)


def _kl_problems(run: RunResult) -> list[str]:
    """A run that is right stays inside of its bounds at every step; one that is wrong has to show."""
    low, high = FP8_KL if run.arm.quantization else BF16_KL
    bounds = f"[{low:.0e}, {high:.0e}]"
    if run.arm.wrong_scale != 1:
        kl = mean_kl(run)
        return [f"mean k3 KL {kl:.2e} is inside {bounds}"] if low <= kl <= high else []
    return [
        f"step {number}: k3 KL {step[KL]:.2e} is outside {bounds}"
        for number, step in enumerate(run.metrics, 1)
        if KL in step and not low <= step[KL] <= high
    ]


def _refit_problems(refit: dict) -> list[str]:
    status, step = refit["status"], refit["step"]
    if not isinstance(status, dict):
        return [f"step {step}: no status ({status})"]
    found = []
    if not status["consistent"]:
        found.append(f"step {step}: not consistent: {status['problems'][:1]}")
    if status["last_refit"]["outcome"] != "ok" or not status["last_refit"]["complete"]:
        found.append(f"step {step}: refit {status['last_refit']}")
    if refit["weight_version"] != str(step):
        found.append(f"step {step}: weight_version {refit['weight_version']!r}")
    return found
