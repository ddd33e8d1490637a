"""RL on a pretrained model: `small_dapo`'s update and refit, rollouts from a real SGLang server."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from measured import versions
from small_dapo.dapo import Dapo
from small_dapo.dynamic_sampling import dynamic_sampling
from small_dapo.loop import rollout_figures
from small_dapo.model import Policy
from small_dapo.refit import FullSender
from small_dapo.rollout import Group, grouped
from small_dapo.settings import Settings

from sglang_fp8rl.lab.cpu_platform.cpu_linear import FP32_SUMS_VARIABLE

from .arms import ARMS, BASELINE, DEFAULT, Arm, with_exemptions
from .rl_policy import trained_policy
from .serving import ArmServer
from .sums import Encode, Sum, draw_sums

Record = dict[str, Any]
RESPONSE_TOKENS = 5
_BATCH = 128
SETTINGS = Settings(
    prompts=12,
    samples=8,
    train_prompts=8,
    max_generations=1,
    minibatches=2,
    learning_rate=2e-5,
    warmup_updates=2,
    validation=48,
)


@dataclass(frozen=True)
class RlArm:
    """How rollouts are served, and what the trainer does about it.

    Attributes:
        tis: the loss corrects for it (token-level TIS, C = 2).
        served: the trainer computes with the weights as they are served.
    """

    name: str
    serving: Arm
    tis: bool = True
    served: bool = False


def rl_arms(ignored_layers: Sequence[str] = ()) -> dict[str, RlArm]:
    """The arms; with `ignored_layers` (what `sglang-fp8rl sensitivity` chose) one more."""
    fp8, weights_only = _in_fp32(ARMS[DEFAULT]), _in_fp32(ARMS["fp8_weights_only"])
    arms = [
        RlArm("bf16", ARMS[BASELINE]),
        RlArm("fp8", fp8),
        RlArm("fp8_without_tis", fp8, tis=False),
        RlArm("served", fp8, served=True),
        RlArm("served_without_tis", fp8, served=True, tis=False),
        RlArm("served_bf16_activations", weights_only, served=True),
        RlArm("served_bf16_activations_without_tis", weights_only, served=True, tis=False),
    ]
    if ignored_layers:
        arms.append(RlArm("fp8_chosen", _in_fp32(with_exemptions(ignored_layers))))
    return {arm.name: arm for arm in arms}


def _in_fp32(arm: Arm) -> Arm:
    """Products summed in FP32, as those of BF16 are here (`launch.py`): half the time of exact ones."""
    return replace(arm, env={**arm.env, FP32_SUMS_VARIABLE: "1"})


@dataclass(frozen=True)
class RlRun:
    """What is run.

    Attributes:
        folder: the converted checkpoint.
        encode: its tokenizer, from text to ids.
        trained_layers: see `trained_policy`.
        work: takes the server's log.
        validate_every: so many steps; after the last one always.
        keep: takes the policy as it was validated last, as a checkpoint.
    """

    arm: RlArm
    folder: Path
    encode: Encode
    seed: int
    steps: int
    threads: int
    work: Path
    trained_layers: int | None = None
    validate_every: int = 4
    keep: Path | None = None


def run_steps(run: RlRun) -> Iterator[Record]:
    """Serve, then step by step: sample, train, refit, validate; a record per step, 0 the start."""
    settings = SETTINGS if run.arm.tis else replace(SETTINGS, tis_cap=None)
    end = run.encode("\n")
    torch.manual_seed(run.seed)
    policy = trained_policy(run.folder, end[0], run.trained_layers)
    trainer = Dapo(policy, settings)
    draw = random.Random(f"sums {run.seed}")
    held_out = draw_sums(
        random.Random("validation"), settings.validation, run.encode, held_out=True
    )
    log = run.work / f"rl-{run.arm.name}-{run.seed}.log"
    with ArmServer(
        run.arm.serving, run.folder, run.threads, run.seed, log, remember=True, batch=_BATCH
    ) as server:
        sender = FullSender(server.url)
        if run.arm.served:
            policy.compute_as_served(sender.client.plan())
        yield {
            "step": 0,
            "val_accuracy": _validate(server, held_out, end),
            **_proven(run, policy, sender),
            **versions("sglang", "torch", "verl"),
            "avx512_bf16_products": torch.ops.mkldnn._is_mkldnn_bf16_supported(),
            "threads": run.threads,
            "trained_layers": run.trained_layers,
            "settings": asdict(settings),
        }
        for step in range(1, run.steps + 1):
            began = time.perf_counter()
            sampled = dynamic_sampling(
                lambda: _sample(server, draw_sums(draw, settings.prompts, run.encode), end),
                settings,
            )
            seconds = time.perf_counter() - began
            record = {"step": step, **rollout_figures(policy, sampled)}
            record["figures_seconds"] = time.perf_counter() - began - seconds
            record["sample_seconds"] = seconds
            if sampled.used:
                record |= asdict(trainer.update(sampled.used))
            sent = sender.send(policy.masters)
            record |= {"refit_bytes": sent.nbytes, "refit_seconds": sent.seconds}
            if step % run.validate_every == 0 or step == run.steps:
                record["val_accuracy"] = _validate(server, held_out, end)
                record |= _proven(run, policy, sender)
                if run.keep is not None:
                    policy.save(run.keep)
            record["step_seconds"] = time.perf_counter() - began
            yield record


def _proven(run: RlRun, policy: Policy, sender: FullSender) -> Record:
    return {"tensors_proven": policy.prove(sender.client)} if run.arm.served else {}


def _sample(server: ArmServer, problems: Sequence[Sum], end: list[int]) -> list[Group]:
    """Several answers to each problem; a first pass leaves the prompts in the server's cache."""
    server.sample([p.prompt for p in problems], 1, end)
    samples = SETTINGS.samples
    repeated = [p.prompt for p in problems for _ in range(samples)]
    return grouped(problems, samples, server.sample(repeated, RESPONSE_TOKENS, end))


def _validate(server: ArmServer, problems: Sequence[Sum], end: list[int]) -> float:
    answers = server.sample([p.prompt for p in problems], RESPONSE_TOKENS, end, temperature=0.0)
    right = [a.output_ids == p.answer for a, p in zip(answers, problems, strict=True)]
    return sum(right) / len(right)
