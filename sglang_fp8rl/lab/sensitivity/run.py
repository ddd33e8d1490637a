"""From a checkpoint and a budget to a finding: the whole of `sglang-fp8rl sensitivity`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from typing import cast

from ...engine.host.plan_offline import make_plan
from ...wire.plan import RefitPlan
from ..eval.options import check_values
from ..eval.prompts import load_prompts
from ..eval.rescoring import Precision, load_tokenizer
from .budget import budget_bytes, choose
from .finding import Finding, effects_of, finding_of
from .measure import Measurement, Settings, key_of
from .memory import check_fits, free_bytes, needed_bytes
from .prompt_groups import Groups
from .reference import SensitivityError, load_reference
from .results_file import ResultsFile
from .served_modules import served_modules

_VALUE_BYTES = {"float32": 4, "bfloat16": 2}


def run_sensitivity(
    model: str,
    settings: Settings,
    *,
    on_total: Callable[[str, int | None], None] = lambda name, total: None,
    on_step: Callable[[str], None] = lambda name: None,
) -> Finding:
    """Plan, load, measure what `settings.results` does not have, choose, check.

    Args:
        model: checkpoint folder or model id.
        on_total: called when a part begins: its name and its number of steps.
        on_step: called after each.

    Raises:
        Fp8RlError: bad options, prompts or budget; a model that can't be planned, held or measured; a
            results file of another run.
    """
    dtype, is_wide = settings.dtype, settings.options.get("round_to_bf16") is False
    check_values(
        ("--dtype", dtype, dtype in _VALUE_BYTES, "float32 or bfloat16"),
        (
            "--dtype",
            dtype,
            dtype == "float32" or not is_wide,
            "float32 where round_to_bf16 is false",
        ),
    )
    plan = make_plan(
        model, tp_size=settings.tp_size, ep_size=settings.ep_size, options=settings.options
    )
    modules = served_modules(plan)
    if not modules:
        raise SensitivityError(
            model,
            "no module is served in FP8",
            "there has to be something to leave out",
            "Look at `sglang-fp8rl plan MODEL`, which gives the reasons.",
        )
    allowed = budget_bytes(settings.budget, modules)
    vocabulary = plan.document["model"]["vocab_size"] or 1
    prompts = load_prompts(settings.prompts, load_tokenizer(model), vocabulary)
    _check_memory(model, settings, plan, prompts)
    on_total("load the model", None)
    reference = load_reference(
        model, plan, modules, device=settings.device, dtype=cast(Precision, dtype)
    )
    key = key_of(reference, plan, prompts, settings)
    with closing(ResultsFile(settings.results, key)) as results:
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


def _check_memory(
    model: str, settings: Settings, plan: RefitPlan, prompts: Sequence[Sequence[int]]
) -> None:
    lengths = [len(prompt) + settings.new_tokens for prompt in prompts]
    tokens = settings.samples_each * sum(lengths)
    needed = needed_bytes(
        plan,
        value_bytes=_VALUE_BYTES[settings.dtype],
        tokens=tokens,
        tokens_at_once=min(tokens, max(settings.tokens_at_once, *lengths)),
    )
    free = free_bytes(settings.device)
    check_fits(model, needed, free, tokens=tokens, device=settings.device)
