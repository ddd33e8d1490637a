"""From a checkpoint and a budget to a finding: the whole of `sglang-fp8rl sensitivity`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from ...engine.host.plan_offline import make_plan
from ...errors import ConfigError
from ...wire.plan import RefitPlan
from ..eval.prompts import load_prompts
from ..eval.rescoring import load_tokenizer
from .budget import budget_bytes, choose
from .finding import Finding, effects_of, finding_of
from .measure import Measurement, Settings, key_of
from .memory import check_fits, free_bytes, needed_bytes
from .prompt_groups import Groups
from .reference import ComputeDtype, SensitivityError, load_reference
from .results_file import ResultsFile
from .served_modules import ServedModule, served_modules

_VALUE_BYTES = {"float32": 4, "bfloat16": 2}


@dataclass(frozen=True)
class Wish:
    """What is asked for.

    Attributes:
        model: checkpoint folder or model id.
        budget: see `budget.budget_bytes`.
        prompts: see `prompts.load_prompts`.
        tp_size, ep_size, options: of the server: they decide the schemes.
        results: file of the measurements.
        device: of torch.
    """

    model: str
    budget: str = "10%"
    prompts: Path | None = None
    tp_size: int = 1
    ep_size: int = 1
    options: Mapping[str, Any] = field(default_factory=dict)
    results: Path = Path("sensitivity.jsonl")
    device: str = "cpu"


def run_sensitivity(
    wish: Wish,
    settings: Settings,
    *,
    on_total: Callable[[str, int | None], None] = lambda name, total: None,
    on_step: Callable[[str], None] = lambda name: None,
) -> Finding:
    """Plan, load, measure what `wish.results` does not have, choose, check.

    Args:
        on_total: called when a part begins: its name and its number of steps.
        on_step: called after each.

    Raises:
        Fp8RlError: bad options, prompts or budget; a model that can't be planned, held or measured; a
            results file of another run.
    """
    _check_dtype(settings.dtype, wish.options)
    plan = make_plan(wish.model, tp_size=wish.tp_size, ep_size=wish.ep_size, options=wish.options)
    modules = _candidates(wish.model, plan)
    allowed = budget_bytes(wish.budget, modules)
    vocabulary = plan.document["model"]["vocab_size"] or 1
    prompts = load_prompts(wish.prompts, load_tokenizer(wish.model), vocabulary)
    _check_memory(wish, settings, plan, modules, prompts)
    on_total("load the model", None)
    reference = load_reference(
        wish.model, plan, modules, device=wish.device, dtype=cast(ComputeDtype, settings.dtype)
    )
    with closing(ResultsFile(wish.results, key_of(reference, plan, prompts, settings))) as results:
        run = Measurement(reference, plan, modules, results, settings, on_step)
        on_total("answers", len(prompts))
        run.draw_samples(prompts)
        on_total("modules", len(run.remaining_effects()))
        run.measure_effects()
        effects = effects_of(modules, results.known, Groups(results.known.samples))
        choice = choose(modules, effects, allowed)
        on_total("check", 2)
        run.all_but(())
        run.all_but(choice.names)
        return finding_of(modules, plan, results.known, choice)


def _candidates(model: str, plan: RefitPlan) -> list[ServedModule]:
    modules = served_modules(plan)
    if not modules:
        raise SensitivityError(
            model,
            "no module is served in FP8",
            "there has to be something to leave out",
            "Look at `sglang-fp8rl plan MODEL`, which gives the reasons.",
        )
    return modules


def _check_dtype(dtype: str, options: Mapping[str, Any]) -> None:
    if dtype not in _VALUE_BYTES:
        raise ConfigError("--dtype", repr(dtype), "float32 or bfloat16", "Choose one of them.")
    if dtype == "bfloat16" and options.get("round_to_bf16") is False:
        raise ConfigError(
            "--dtype",
            "'bfloat16' with round_to_bf16: false",
            "a cast without the step to BF16 needs the weights in FP32",
            "Use --dtype float32.",
        )


def _check_memory(
    wish: Wish,
    settings: Settings,
    plan: RefitPlan,
    modules: Sequence[ServedModule],
    prompts: Sequence[Sequence[int]],
) -> None:
    each = settings.samples if settings.new_tokens else 1
    lengths = [len(prompt) + settings.new_tokens for prompt in prompts]
    tokens = each * sum(lengths)
    needed = needed_bytes(
        plan,
        value_bytes=_VALUE_BYTES[settings.dtype],
        tokens=tokens,
        tokens_at_once=min(tokens, max(settings.tokens_at_once, *lengths)),
    )
    free = free_bytes(wish.device)
    check_fits(wish.model, needed, free, tokens=tokens, device=wish.device)
