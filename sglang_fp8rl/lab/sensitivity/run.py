"""From a checkpoint and a budget to a finding: the whole of `sglang-fp8rl sensitivity`."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import cast

from ...errors import ConfigError, EvaluationError
from ...wire.plan import RefitPlan
from ..eval.gap import NO_DEVICE, Precision, load_tokenizer, no_device
from ..eval.options import check_values
from ..eval.prompts import load_prompts, prompt_lines
from ..plan_offline import make_plan
from .finding import Finding, effects_of, finding_of
from .measure import Measurement, Settings, key_of
from .reference import load_reference
from .results_file import ResultsFile, check_place
from .samples import Groups
from .served_modules import budget_bytes, choose, parsed_budget, served_modules

_VALUE_BYTES = {"float32": 4, "bfloat16": 2}
_CGROUP = Path("/sys/fs/cgroup")


def run_sensitivity(
    model: str,
    settings: Settings,
    *,
    on_total: Callable[[str, int | None], None] = lambda name, total: None,
    on_step: Callable[[str], None] = lambda name: None,
) -> Finding:
    """Plan, load, measure what `settings.results` does not have, choose, check.

    Args:
        on_total: called when a part begins, with its name and its number of steps; `on_step` after each.

    Raises:
        Fp8RlError: bad options, prompts or budget; a model that can't be planned, held or measured; a
            results file of another run.
    """
    dtype, is_wide = settings.dtype, settings.options.get("round_to_bf16") is False
    goes_together = dtype == "float32" or not is_wide
    check_values(
        ("--dtype", dtype, dtype in _VALUE_BYTES, "float32 or bfloat16"),
        ("--dtype", dtype, goes_together, "float32 where round_to_bf16 is false"),
    )
    check_place(settings.results)
    # What is wrong with these is told before the plan is made, which takes a minute.
    parsed_budget(settings.budget)
    if settings.prompts is not None and not settings.prompts.is_fifo():  # which gives them once
        prompt_lines(settings.prompts)
    plan = make_plan(
        model, tp_size=settings.tp_size, ep_size=settings.ep_size, options=settings.options
    )
    modules = served_modules(plan)
    if not modules:
        raise EvaluationError(
            model,
            "no module is served in FP8",
            "there has to be something to leave out",
            "Look at `sglang-fp8rl plan MODEL`, which gives the reasons.",
        )
    allowed = budget_bytes(settings.budget, modules)
    vocabulary = plan.document["model"]["vocab_size"]
    prompts = load_prompts(settings.prompts, load_tokenizer(model), vocabulary)
    _check_memory(model, settings, plan, prompts)
    on_total("load the model", None)
    reference = load_reference(
        model, plan, modules, device=settings.device, dtype=cast(Precision, dtype)
    )
    key = key_of(reference, prompts, settings)
    with closing(ResultsFile(settings.results, key)) as results:
        run = Measurement(reference, results, settings, on_step)
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
    device = settings.device
    check_fits(model, needed, free_bytes(device), tokens=tokens, device=device)


def needed_bytes(plan: RefitPlan, *, value_bytes: int, tokens: int, tokens_at_once: int) -> int:
    """An estimate: the weights, what is kept of the clean run, and the largest temporaries.

    Args:
        value_bytes: of a weight as it is computed with.
        tokens: of all sequences, padding included.
    """
    shapes = [one.shape for one in plan.tensors.values() if one.shape is not None]
    model = plan.document["model"]
    hidden, vocabulary = model["hidden_size"] or 0, model["vocab_size"] or 0
    layers = model["num_hidden_layers"] or 0
    weights = value_bytes * sum(math.prod(shape) for shape in shapes)
    kept = tokens * (value_bytes * hidden * layers + 4 * vocabulary)
    largest = max((math.prod(shape[-2:]) for shape in shapes if len(shape) > 1), default=0)
    # Logits as the model gives them, their log-softmax; one weight quantized and dequantized.
    temporary = tokens_at_once * vocabulary * (value_bytes + 8) + 16 * largest
    return weights + kept + temporary


def free_bytes(device: str) -> int:
    """What this process may still take: of the GPU, or of the machine and its control group.

    Raises:
        ConfigError: torch can't use the device.
    """
    import psutil
    import torch

    if device != "cpu":
        try:
            return torch.cuda.mem_get_info(torch.device(device))[0]
        except NO_DEVICE as error:
            raise no_device(device, error) from error
    free = psutil.virtual_memory().available
    limit, used = _CGROUP / "memory.max", _CGROUP / "memory.current"
    if limit.exists() and used.exists() and limit.read_text().strip() != "max":
        # What is used counts files that can be dropped, so this is a cautious number.
        free = min(free, max(0, int(limit.read_text()) - int(used.read_text())))
    return free


def check_fits(model: str, needed: int, free: int, *, tokens: int, device: str) -> None:
    """Raises `ConfigError` for what would end in an out-of-memory kill."""
    if needed > free:
        raise ConfigError(
            model,
            f"{needed / 1e9:.1f} GB are needed for its weights and {tokens} tokens",
            f"{free / 1e9:.1f} GB are free on {device}",
            "Take fewer prompts or --new-tokens, --dtype bfloat16, or a machine or --device with more.",
        )
