"""One run: one arm, one seed, so many steps. Yields a record per step."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from measured import versions

from sglang_fp8rl.lab.metrics import mismatch_metrics
from sglang_fp8rl.lab.testing.checkpoints import save_checkpoint

from .dapo import Dapo
from .dynamic_sampling import Sampled, dynamic_sampling
from .model import Policy, padded
from .refit import FullSender, make_sender
from .rollout import PolicyServer, digest
from .settings import Arm, Settings
from .task import draw_problems

Record = dict[str, Any]


@dataclass(frozen=True)
class Run:
    """What is run.

    Attributes:
        start: FP32 weights the arm starts from.
        work: a directory for the checkpoint and the server's log.
        fault: see `refit.py`; None in every real run.
    """

    arm: Arm
    settings: Settings
    seed: int
    steps: int
    start: dict[str, torch.Tensor]
    work: Path
    threads: int = 1
    fault: str | None = None


def run_steps(run: Run) -> Iterator[Record]:
    """Serve, then step by step: sample, train, refit, validate.

    The record of step 0 holds the start's validation accuracy and the conditions of the run. That
    of step n > 0 holds figures of its rollouts (served weights of n − 1) and the accuracy of its
    refitted server.
    """
    settings = run.settings
    policy = Policy.random(settings, run.seed)
    policy.load(nudged(run.start) if run.arm.nudged else run.start)
    checkpoint = save_checkpoint(run.work / "checkpoint", policy.config, policy.state_dict())
    trainer = Dapo(policy, settings)
    draw = random.Random(f"train {run.seed}")
    held_out = draw_problems(random.Random("validation"), settings.validation, held_out=True)
    log = run.work / "server.log"
    with PolicyServer(run.arm, settings, checkpoint, run.seed, run.threads, log) as server:
        sender = make_sender(run.arm.sender, server.url, run.fault)
        sender.send(policy.masters)
        if run.arm.served:
            policy.compute_as_served(sender.client.plan())
        yield {"step": 0, "val_accuracy": server.validate(held_out).accuracy, **conditions(run)}
        for step in range(1, run.steps + 1):
            began = time.perf_counter()
            sampled = dynamic_sampling(
                lambda: server.sample(draw_problems(draw, settings.prompts)), settings
            )
            record = {"step": step, **rollout_figures(policy, sampled)}
            if sampled.used:
                record |= asdict(trainer.update(sampled.used))
            sent = sender.send(policy.masters)
            record["refit_bytes"] = sent.nbytes
            record["refit_seconds"] = sent.seconds
            if sent.changed is not None:
                record["codes_changed"] = sent.changed.codes
                record["blocks_changed"] = sent.changed.blocks
            served = server.validate(held_out)
            record["val_accuracy"] = served.accuracy
            if run.arm.served:
                record["tensors_proven"] = policy.prove(sender.client)
            record["step_seconds"] = time.perf_counter() - began
            if run.arm.sender != "full":
                # The same masters by the other road; what is served has to be the same.
                FullSender(server.url).send(policy.masters)
                record["equals_full"] = server.validate(held_out) == served
            yield record


def nudged(start: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The same weights, one of them about one step of BF16 larger."""
    name = "model.layers.0.mlp.down_proj.weight"
    weight = start[name].clone()
    weight.view(-1)[weight.argmax()] *= 1 + 2**-7
    return {**start, name: weight}


def conditions(run: Run) -> Record:
    """What the run was made with."""
    return {
        **versions("sglang", "torch", "verl"),
        "threads": run.threads,
        "settings": asdict(run.settings),
    }


def rollout_figures(policy: Policy, sampled: Sampled) -> Record:
    """Reward, accuracy and the train/rollout gap over everything that was sampled."""
    groups = sampled.drawn
    responses = [response for group in groups for response in group.responses]
    prompts = [group.problem.prompt for group in groups for _ in group.responses]
    with torch.no_grad():
        trained, mask = policy.logprobs(prompts, responses)
    gap = mismatch_metrics(padded([row for g in groups for row in g.logprobs]), trained, mask)
    correct = [right for group in groups for right in group.correct]
    rewards = [reward for group in groups for reward in group.rewards]
    return {
        "train_accuracy": sum(correct) / len(correct),
        "reward": sum(rewards) / len(rewards),
        "response_tokens": sum(map(len, responses)) / len(responses),
        "groups_drawn": len(groups),
        "groups_used": len(sampled.used),
        "kl_k1": gap.kl_k1,
        "kl_k3": gap.kl_k3,
        "ratio_max": gap.ratio_max,
        "mult_prob_error": gap.mult_prob_error,
        "prob_pearson": gap.prob_pearson,
        "entropy": -trained.sum().item() / mask.sum().item(),
        "rollout_digest": digest([(group.responses, group.logprobs) for group in groups]),
    }
