"""What divergence is measured on: prompts, and the unquantized model's answers; which have a say in the choice."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

# Every so many prompts one has no say in the choice, and is what the choice is checked on.
HELD_OUT = 4


@dataclass(frozen=True)
class Sample:
    """Token ids of a prompt and of an answer to it; without an answer the prompt itself counts."""

    prompt: tuple[int, ...]
    answer: tuple[int, ...] = ()

    @property
    def ids(self) -> tuple[int, ...]:
        return self.prompt + self.answer

    @property
    def counted(self) -> slice:
        """Positions whose next-token distributions are compared: those that an answer comes from."""
        if not self.answer:
            return slice(0, len(self.prompt))
        return slice(len(self.prompt) - 1, len(self.ids) - 1)

    @property
    def tokens(self) -> int:
        return self.counted.stop - self.counted.start


@dataclass(frozen=True)
class Batch:
    """Samples that go through the model together.

    Attributes:
        ids: `[samples, longest]`, filled up on the right: in a causal model no token sees what comes
            behind it, so no mask is needed.
    """

    ids: torch.Tensor
    counted: tuple[slice, ...]

    def rows(self, values: torch.Tensor) -> list[torch.Tensor]:
        """Of `[samples, longest, …]`, each sample's counted positions."""
        return [value[part] for value, part in zip(values, self.counted, strict=True)]


@torch.inference_mode()
def sample_answers(
    model: Any, prompt: Sequence[int], *, new_tokens: int, samples: int, seed: int
) -> list[Sample]:
    """Answers as a rollout has them: at temperature 1, from the whole distribution, seeded.

    Args:
        new_tokens: of an answer, at most; 0 gives the prompt alone, once.
        samples: how many answers.
    """
    if not new_tokens:
        return [Sample(tuple(prompt))]
    from transformers import GenerationConfig

    stop = model.generation_config.eos_token_id
    ends = [stop] if isinstance(stop, int) else list(stop or ())
    # In place of the checkpoint's own, which fill what is left out here: no penalty but the end stays.
    settings = GenerationConfig(
        do_sample=True,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        max_new_tokens=new_tokens,
        num_return_sequences=samples,
        eos_token_id=stop,
        pad_token_id=ends[0] if ends else 0,
    )
    model.generation_config.update(**settings.to_dict())
    ids = torch.tensor([list(prompt)], device=model.device)
    with torch.random.fork_rng(devices=[] if model.device.type == "cpu" else None):
        torch.manual_seed(seed)
        made = model.generate(ids, attention_mask=torch.ones_like(ids))
    found = []
    for row in made[:, len(prompt) :].tolist():
        # An answer has its first end token; what comes behind it is filling.
        end = next((at for at, token in enumerate(row, start=1) if token in ends), len(row))
        found.append(Sample(tuple(prompt), tuple(row[:end])))
    return found


def batches(samples: Sequence[Sample], tokens_at_once: int, device: torch.device) -> list[Batch]:
    """Samples in their order, as many together as fit `tokens_at_once`; always one."""
    groups: list[list[Sample]] = []
    for sample in samples:
        wider = [*groups[-1], sample] if groups else []
        if groups and len(wider) * max(len(one.ids) for one in wider) <= tokens_at_once:
            groups[-1] = wider
        else:
            groups.append([sample])
    return [_batch(group, device) for group in groups]


def _batch(group: Sequence[Sample], device: torch.device) -> Batch:
    rows = [torch.tensor(sample.ids) for sample in group]
    ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    return Batch(ids.to(device), tuple(sample.counted for sample in group))


@dataclass(frozen=True)
class Measured:
    """A ratio of two sums over prompts, with its standard error (linearized, clustered by prompt)."""

    value: float
    error: float

    def __str__(self) -> str:
        return f"{self.value:.2e} ± {self.error:.0e}"


class Groups:
    """Sums over whole prompts: over those that have a say in the choice, and those that it is checked on."""

    def __init__(self, samples: Sequence[Sample]) -> None:
        order: dict[tuple[int, ...], int] = {}
        self._prompts = [order.setdefault(sample.prompt, len(order)) for sample in samples]
        self._tokens = [sample.tokens for sample in samples]
        self.all = set(order.values())
        self.held_out = {number for number in self.all if number % HELD_OUT == HELD_OUT - 1}
        self.chosen_on = self.all - self.held_out

    def tokens(self, prompts: set[int]) -> int:
        return int(self._by_prompt(self._tokens, prompts).sum())

    def per_token(self, kl: Sequence[float], prompts: set[int]) -> Measured:
        """Of a sum per sample: over these prompts, per token."""
        return self.share(kl, self._tokens, prompts)

    def share(self, part: Sequence[float], whole: Sequence[float], prompts: set[int]) -> Measured:
        return ratio(self._by_prompt(part, prompts), self._by_prompt(whole, prompts))

    def _by_prompt(self, values: Sequence[float], prompts: set[int]) -> np.ndarray:
        return np.bincount(self._prompts, weights=values)[sorted(prompts)]


def ratio(part: Sequence[float] | np.ndarray, whole: Sequence[float] | np.ndarray) -> Measured:
    """Sum over sum; the error of a ratio estimator (Cochran 1977, section 6.3). NaN for one prompt, or of nothing."""
    parts, wholes = np.asarray(part), np.asarray(whole)
    total, count = float(wholes.sum()), len(parts)
    value = float(parts.sum()) / total if total else math.nan
    if count < 2 or not total:
        return Measured(value, math.nan)
    squares = float(np.square(parts - value * wholes).sum())
    return Measured(value, math.sqrt(squares * count / (count - 1)) / total)
