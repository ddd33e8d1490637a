"""A run: samples, then each module's effect alone, then whether their sum told the truth."""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from ... import __version__
from ...errors import EvaluationError
from .divergence import CleanRun
from .noise import FitObserver
from .quantized_products import Operand, Products, ServedArithmetic
from .reference import ReferenceModel
from .results_file import ResultsFile
from .samples import batches, sample_answers
from .served_modules import ServedModule


@dataclass(frozen=True)
class Settings:
    """What is asked for, beside the model: what the options of the command say of themselves, and the seed of
    the answers."""

    budget: str = "10%"
    prompts: Path | None = None
    new_tokens: int = 64
    samples: int = 1
    tp_size: int = 1
    ep_size: int = 1
    options: Mapping[str, Any] = field(default_factory=dict)
    results: Path = Path("sensitivity.jsonl")
    by_operand: bool = False
    dtype: str = "float32"
    device: str = "cpu"
    tokens_at_once: int = 2048
    seed: int = 0

    @property
    def samples_each(self) -> int:
        return self.samples if self.new_tokens else 1


def key_of(
    reference: ReferenceModel, prompts: Sequence[Sequence[int]], settings: Settings
) -> dict[str, Any]:
    """What measurements belong to: they are continued where all of this is the same."""
    text = json.dumps([list(prompt) for prompt in prompts]).encode()
    return {
        "sglang_fp8rl": __version__,
        "model": reference.fingerprint,
        "plan": reference.plan.digest,
        "prompts": hashlib.sha256(text).hexdigest()[:16],
        "new_tokens": settings.new_tokens,
        "samples": settings.samples,
        "dtype": settings.dtype,
        "seed": settings.seed,
    }


class Measurement:
    """One model's measurements: what `results` has is not measured again.

    Args:
        on_step: called with a name when something was measured.
    """

    def __init__(
        self,
        reference: ReferenceModel,
        results: ResultsFile,
        settings: Settings,
        on_step: Callable[[str], None] = lambda name: None,
    ) -> None:
        self._reference, self._results = reference, results
        self._settings, self._on_step = settings, on_step
        self._clean: CleanRun | None = None

    def remaining_effects(self) -> list[tuple[ServedModule, Operand]]:
        operands = tuple(Operand) if self._settings.by_operand else (Operand.BOTH,)
        wanted = itertools.product(self._reference.modules, operands)
        known = self._results.known.effects
        return [
            (module, operand) for module, operand in wanted if (module.name, operand) not in known
        ]

    def draw_samples(self, prompts: Sequence[Sequence[int]]) -> None:
        """Answers to those prompts that have none yet."""
        settings = self._settings
        have = len(self._results.known.samples)
        for number, prompt in enumerate(prompts):
            first = number * settings.samples_each
            if have < first + settings.samples_each:
                # A run that was cut off between two answers to a prompt draws them again, and keeps the rest.
                drawn = sample_answers(
                    self._reference.model,
                    prompt,
                    new_tokens=settings.new_tokens,
                    samples=settings.samples,
                    seed=settings.seed + number,
                )
                for one in drawn[max(0, have - first) :]:
                    self._results.add("sample", prompt=one.prompt, answer=one.answer)
            self._on_step("answers")

    def measure_effects(self) -> None:
        """KL of each module quantized alone, from its layer on."""
        for module, operand in self.remaining_effects():
            change = self._quantized([module.name], operand)
            first = self._reference.first_layers[module.name]
            kl = self._clean_run().divergence(first, change)
            self._results.add("effect", module=module.name, operand=operand.value, kl=kl)
            self._on_step(module.name)

    def all_but(self, exempt: Sequence[str]) -> None:
        """KL of each sample with all modules quantized but these."""
        key = tuple(sorted(exempt))
        if key not in self._results.known.sets:
            names = [one.name for one in self._reference.modules if one.name not in key]
            kl = self._clean_run().divergence(0, self._quantized(names))
            self._results.add("set", exempt=key, kl=kl)
        self._on_step(f"all but {len(key)}")

    def _clean_run(self) -> CleanRun:
        """Made when something is to be measured; what it shows of the operands is kept."""
        if self._clean is not None:
            return self._clean
        reference, known = self._reference, self._results.known
        wanted = [one.name for one in reference.modules if one.name not in known.fits]
        observer = FitObserver(wanted, reference.plan)
        with torch.inference_mode(), Products(reference.weights, observer):
            for one in batches(known.samples, 1, reference.device):  # alone: filling is no input
                reference.model(input_ids=one.ids, use_cache=False)
        for name, fit in observer.fits().items():
            self._results.add("fit", module=name, **fit.as_dict())
        unseen = [one.name for one in reference.modules if one.name not in known.fits]
        if unseen:
            raise EvaluationError(
                unseen[0],
                "no product with its weights was seen",
                f"{len(unseen)} modules compute without torch.nn.functional.linear in transformers",
                "This model can't be measured; exempt modules by layer instead "
                "(num_first_layers_in_bf16, num_last_layers_in_bf16).",
            )
        together = batches(known.samples, self._settings.tokens_at_once, reference.device)
        self._clean = CleanRun(reference.model, reference.layers, together)
        return self._clean

    def _quantized(
        self, names: Sequence[str], operand: Operand = Operand.BOTH
    ) -> AbstractContextManager:
        arithmetic = ServedArithmetic(names, self._reference.plan, operand)
        return Products(self._reference.weights, arithmetic)
