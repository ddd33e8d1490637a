"""DAPO's update, from veRL's own functions: group advantages, clip-higher, token-level loss, TIS.

What is veRL's: `compute_grpo_outcome_advantage`, `compute_policy_loss_vanilla` with `token-mean`, and
`compute_rollout_correction_weights`. Dynamic sampling is in `dynamic_sampling.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from verl.trainer.ppo.core_algos import (
    compute_grpo_outcome_advantage,
    compute_policy_loss_vanilla,
)
from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_weights
from verl.workers.config import ActorConfig

from .model import Policy, padded
from .rollout import Group
from .settings import Settings


@dataclass(frozen=True)
class UpdateFigures:
    """What the updates of one step did; means over its minibatches."""

    loss: float
    grad_norm: float
    clip_fraction: float
    tis_capped: float


class Dapo:
    """Optimizer state and one step's updates.

    Args:
        policy: its masters are updated in place.
    """

    def __init__(self, policy: Policy, settings: Settings) -> None:
        self._policy, self._settings = policy, settings
        self._optimizer = torch.optim.AdamW(
            policy.masters.values(), lr=settings.learning_rate, weight_decay=0.0
        )
        self._schedule = torch.optim.lr_scheduler.LinearLR(
            self._optimizer, 1 / settings.warmup_updates, total_iters=settings.warmup_updates
        )
        self._config = ActorConfig(
            strategy="fsdp",
            rollout_n=settings.samples,
            ppo_micro_batch_size_per_gpu=settings.train_prompts * settings.samples,
            clip_ratio_low=settings.clip_low,
            clip_ratio_high=settings.clip_high,
            loss_agg_mode="token-mean",
        )

    def update(self, groups: Sequence[Group]) -> UpdateFigures:
        """Train on whole groups, in `minibatches` optimizer steps."""
        prompts = [group.problem.prompt for group in groups for _ in group.responses]
        responses = [response for group in groups for response in group.responses]
        rollout_logprobs = padded([row for group in groups for row in group.logprobs])
        with torch.no_grad():
            old_logprobs, mask = self._policy.logprobs(prompts, responses)
        advantages = self._advantages(groups, mask)
        weights = self._correction(old_logprobs - rollout_logprobs, mask)
        figures = []
        for rows in np.array_split(np.arange(len(responses)), self._settings.minibatches):
            now, kept = self._policy.logprobs(
                [prompts[row] for row in rows], [responses[row] for row in rows]
            )
            loss, metrics = compute_policy_loss_vanilla(
                old_log_prob=old_logprobs[rows],
                log_prob=now,
                advantages=advantages[rows],
                response_mask=kept,
                loss_agg_mode="token-mean",
                config=self._config,
                rollout_is_weights=None if weights is None else weights[rows],
            )
            self._optimizer.zero_grad()
            loss.backward()
            norm = torch.nn.utils.clip_grad_norm_(
                self._policy.masters.values(), self._settings.max_grad_norm
            )
            self._optimizer.step()
            self._schedule.step()
            figures.append((loss.item(), norm.item(), metrics["actor/pg_clipfrac"]))
        loss_mean, norm_mean, clipped = np.mean(figures, axis=0)
        capped = 0.0
        if weights is not None and self._settings.tis_cap is not None:
            capped = (weights[mask.bool()] >= self._settings.tis_cap).float().mean().item()
        return UpdateFigures(float(loss_mean), float(norm_mean), float(clipped), capped)

    def _correction(self, log_ratio: torch.Tensor, mask: torch.Tensor) -> torch.Tensor | None:
        """Importance weights of the trained tokens, cut at the cap; none without a cap."""
        if self._settings.tis_cap is None:
            return None
        weights, _ = compute_rollout_correction_weights(
            log_ratio, mask, rollout_is="token", rollout_is_threshold=self._settings.tis_cap
        )
        return weights

    def _advantages(self, groups: Sequence[Group], mask: torch.Tensor) -> torch.Tensor:
        rewards = torch.zeros_like(mask)
        last = mask.sum(1).long() - 1
        rewards[torch.arange(len(mask)), last] = torch.tensor(
            [reward for group in groups for reward in group.rewards]
        )
        index = np.repeat(np.arange(len(groups)), [len(group.responses) for group in groups])
        advantages, _ = compute_grpo_outcome_advantage(rewards, mask, index)
        return advantages
