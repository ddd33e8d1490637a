"""Why the gap of FP8 grows while a policy learns: two models on each other's answers.

The start and a trained policy each answer the same problems, and each model's next-token distributions on
either's answers are compared with its own in FP8: of a trainer that computes with its BF16 weights, or with
the weights as served, so that activations alone differ. If a model's gap is the same on both answers, the weights
make it; if both models' gaps are larger on the trained one's answers, the texts do.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from statistics import mean

import measured
import numpy as np
import torch
from rich.console import Console
from rich.progress import Progress

from sglang_fp8rl.lab.eval.stats import Estimate
from sglang_fp8rl.lab.plan_offline import make_plan
from sglang_fp8rl.lab.sensitivity.quantized_products import (
    Operand,
    Products,
    ServedArithmetic,
)
from sglang_fp8rl.lab.sensitivity.reference import ReferenceModel, load_reference
from sglang_fp8rl.lab.sensitivity.samples import Sample, batches, sample_answers
from sglang_fp8rl.lab.sensitivity.served_modules import ServedModule, served_modules
from sglang_fp8rl.wire.plan import RefitPlan

from .fetch import fetch
from .measures import Resamples
from .rl import RESPONSE_TOKENS
from .rl_runs import kept_policy
from .sums import Encode, draw_sums, encoder_of

_TOKENS_AT_ONCE = 1024
PARTS = ("all", "front", "trained")


@dataclass(frozen=True)
class Gap:
    """Means over the positions that an answer comes from; logits and divergences in nats.

    Attributes:
        entropy: of the trainer's model.
        kl: KL(trainer || FP8), over the vocabulary.
        noise: standard deviation over the vocabulary of what FP8 adds to the logits.
        spread: standard deviation over the vocabulary of the trainer's logits.
        noise_of_likely: as `noise`, each token weighted by its probability.
    """

    entropy: float
    kl: float
    noise: float
    spread: float
    noise_of_likely: float


@dataclass(frozen=True)
class Line:
    """One row of the table.

    Attributes:
        model, answers: whose; `start` or `trained`.
        part: which modules are quantized; one of `PARTS`.
        kl: of `gap`, with its 95 % interval by resampling problems.
        kl_median: of a position. A mean far above it is that of a few tokens.
    """

    model: str
    answers: str
    part: str
    positions: int
    gap: Gap
    kl: Estimate
    kl_median: float


class Served:
    """One model, as the trainer computes with it and with FP8 products.

    Args:
        folder: of its checkpoint.
        plan: of the server.
        end: the token that ends an answer, as in the run: what a model would say behind it nobody trained.
        trained_layers: so many last layers are the part `trained`, all others `front`.
        as_served: the trainer computes with the weights as served; a part then adds FP8 activations.
    """

    def __init__(
        self,
        folder: Path,
        plan: RefitPlan,
        end: int,
        trained_layers: int,
        *,
        as_served: bool = False,
    ) -> None:
        self._as_served = as_served
        self._modules = served_modules(plan)
        self._plan = plan
        self._reference: ReferenceModel = load_reference(str(folder), plan, self._modules)
        self._reference.model.generation_config.eos_token_id = end
        self._first = len(self._reference.layers) - trained_layers

    def answers(self, prompts: Sequence[Sequence[int]], samples: int, seed: int) -> list[Sample]:
        asked = functools.partial(
            sample_answers,
            self._reference.model,
            new_tokens=RESPONSE_TOKENS,
            samples=samples,
            seed=seed,
        )
        return [one for prompt in prompts for one in asked(prompt)]

    def gaps(self, samples: Sequence[Sample]) -> Iterator[tuple[str, list[Gap]]]:
        """For each part: what FP8 in it changes at every position that an answer comes from."""
        clean = self._logits(samples, self._trainer())
        for part in PARTS:
            changed = self._logits(samples, self._quantized(part))
            yield part, [gap_of(*pair) for pair in zip(clean, changed, strict=True)]

    @torch.inference_mode()
    def _logits(
        self, samples: Sequence[Sample], change: AbstractContextManager
    ) -> list[torch.Tensor]:
        """`[V]` FP64 of every position that an answer comes from."""
        rows: list[torch.Tensor] = []
        for batch in batches(samples, _TOKENS_AT_ONCE, self._reference.device):
            with change:
                logits = self._reference.model(input_ids=batch.ids, use_cache=False).logits
            rows += [row.double() for sample in batch.rows(logits) for row in sample]
        return rows

    def _trainer(self) -> AbstractContextManager:
        if not self._as_served:
            return nullcontext()
        return Products(self._reference.weights, self._arithmetic("all", Operand.WEIGHTS))

    def _quantized(self, part: str) -> Products:
        fp8 = self._arithmetic(part, Operand.BOTH)
        if not self._as_served:
            return Products(self._reference.weights, fp8)
        weights = self._arithmetic("all", Operand.WEIGHTS)

        def compute(
            module: ServedModule, x: torch.Tensor, weight: torch.Tensor
        ) -> torch.Tensor | None:
            product = fp8(module, x, weight)
            return weights(module, x, weight) if product is None else product

        return Products(self._reference.weights, compute)

    def _arithmetic(self, part: str, operand: Operand) -> ServedArithmetic:
        names = [
            module.name
            for module in self._modules
            if part == "all" or ((module.layer or 0) >= self._first) is (part == "trained")
        ]
        return ServedArithmetic(names, self._plan, operand)


def gap_of(clean: torch.Tensor, changed: torch.Tensor) -> Gap:
    """What lies between two rows of logits `[V]`."""
    ours, theirs = clean.log_softmax(-1), changed.log_softmax(-1)
    likely = ours.exp()
    added = changed - clean
    around = added - (likely * added).sum()
    return Gap(
        entropy=float(-(likely * ours).sum()),
        kl=float((likely * (ours - theirs)).sum()),
        noise=float(added.std(correction=0)),
        spread=float(clean.std(correction=0)),
        noise_of_likely=float((likely * around.square()).sum().sqrt()),
    )


def line_of(
    model: str, answers: str, part: str, samples: Sequence[Sample], rows: Sequence[Gap]
) -> Line:
    """Means over the rows; `samples` say which problem each is of."""
    means = {one.name: mean(getattr(row, one.name) for row in rows) for one in fields(Gap)}
    kls = np.array([row.kl for row in rows])
    number: dict[tuple[int, ...], int] = {}
    problem = [
        number.setdefault(one.prompt, len(number)) for one in samples for _ in range(one.tokens)
    ]
    sums, counts = np.bincount(problem, weights=kls), np.bincount(problem)
    kl = Resamples(len(counts)).ratio(sums, counts)
    return Line(model, answers, part, len(rows), Gap(**means), kl, float(np.median(kls)))


def measure_growth(
    start: Path,
    trained: Path,
    encode: Encode,
    *,
    trained_layers: int,
    problems: int,
    samples: int,
    seed: int = 0,
    as_served: bool = False,
    on_line: Callable[[], None] = lambda: None,
) -> list[Line]:
    """Each model on each model's answers to held-out sums, quantized whole and in parts.

    Args:
        as_served: see `Served`.
    """
    plan = make_plan(str(start))
    folders = {"start": start, "trained": trained}
    models = {
        name: Served(folder, plan, encode("\n")[-1], trained_layers, as_served=as_served)
        for name, folder in folders.items()
    }
    drawn = draw_sums(random.Random(f"growth {seed}"), problems, encode, held_out=True)
    prompts = [one.prompt for one in drawn]
    texts = {name: model.answers(prompts, samples, seed) for name, model in models.items()}
    lines = []
    for name, model in models.items():
        for whose, answers in texts.items():
            for part, rows in model.gaps(answers):
                lines.append(line_of(name, whose, part, answers, rows))
                on_line()
    return lines


def run_growth(
    model: str,
    arm: str,
    seed: int,
    console: Console,
    *,
    trained_layers: int,
    problems: int,
    samples: int,
    as_served: bool,
    path: Path | None,
) -> None:
    """Measure, show, and append what `python -m studies.real_model rl --keep` left.

    Raises:
        ConfigError: it left nothing.
    """
    start, trained = fetch(model, console), kept_policy(model, arm, seed)
    with Progress(console=console) as progress:
        task = progress.add_task("gaps", total=4 * len(PARTS))
        lines = measure_growth(
            start,
            trained,
            encoder_of(start),
            trained_layers=trained_layers,
            problems=problems,
            samples=samples,
            seed=seed,
            as_served=as_served,
            on_line=lambda: progress.advance(task),
        )
    show(lines, console)
    if path is not None:
        made_with = {
            "arm": arm,
            "seed": seed,
            "trained_layers": trained_layers,
            "trainer": "weights as served" if as_served else "BF16",
            **measured.versions("torch", "transformers"),
        }
        measured.append(path, map(asdict, lines), **made_with)


def show(lines: Sequence[Line], console: Console) -> None:
    """A table; the last column is what FP8 adds, relative to what it is added to."""
    columns = (
        *("model", "answers of", "quantized", "positions", "entropy"),
        *("KL", "median", "noise", "spread", "noise / spread", "of likely"),
    )
    table = measured.table("FP8's gap by model, answers and quantized layers", columns, words=3)
    for line in lines:
        gap = line.gap
        table.add_row(
            *(line.model, line.answers, line.part, str(line.positions)),
            *(f"{gap.entropy:.3f}", f"{line.kl.value:.4f} [{line.kl.low:.4f}, {line.kl.high:.4f}]"),
            *(f"{line.kl_median:.4f}", f"{gap.noise:.3f}", f"{gap.spread:.3f}"),
            *(f"{gap.noise / gap.spread:.4f}", f"{gap.noise_of_likely:.3f}"),
        )
    console.print(table)
