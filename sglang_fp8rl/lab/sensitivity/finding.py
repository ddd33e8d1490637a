"""What the measurements say: each module's effect, the choice for a budget, and whether it keeps its promise."""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ...config import Options
from ...wire.plan import RefitPlan
from .noise import Fit
from .quantized_products import Operand
from .results_file import Measurements
from .samples import Groups, Measured
from .served_modules import Choice, ServedModule, model_bytes, savings

# The chosen set has to bring at least this part of the reduction that was predicted.
KEPT_PROMISE = 0.5


@dataclass(frozen=True)
class ModuleFinding:
    """One module's part.

    Attributes:
        kl: KL(BF16 || this module alone quantized), nats per token, on all prompts.
        by_operand: the same for weights and activations alone, where they were measured.
    """

    module: ServedModule
    kl: Measured
    by_operand: Mapping[str, Measured]
    fit: Fit
    is_exempt: bool

    def as_dict(self) -> dict[str, Any]:
        return {
            "module": self.module.name,
            "scheme": self.module.scheme,
            "reason": self.module.reason,
            "extra_bytes": self.module.extra_bytes,
            "kl": asdict(self.kl),
            **{f"kl_{name}": asdict(value) for name, value in self.by_operand.items()},
            **self.fit.as_dict(),
            "exempt": self.is_exempt,
        }


@dataclass(frozen=True)
class Check:
    """The prediction beside what was measured, on one group of prompts.

    Attributes:
        prompts, tokens: measured on.
        sum_of_effects: KL if the modules' effects added up.
        everything: KL with everything quantized.
        chosen: KL with everything quantized but the choice.
        predicted_share: of the divergence, what should be left.
        share: what is.
    """

    prompts: int
    tokens: int
    sum_of_effects: Measured
    everything: Measured
    chosen: Measured
    predicted_share: float
    share: Measured

    @property
    def additivity(self) -> float:
        """KL of everything over the sum of effects; 1 if they add."""
        total = self.sum_of_effects.value
        return self.everything.value / total if total else math.nan

    @property
    def holds(self) -> bool:
        return 1 - self.share.value >= KEPT_PROMISE * (1 - self.predicted_share)


@dataclass(frozen=True)
class Finding:
    """The result of a run.

    Attributes:
        effects: what the choice was made from: KL per token by module, on prompts that had a say.
        checks: `chosen_on` and, if there were prompts to spare, `held_out`.
        saved_bytes, served_bytes: what FP8 saves on this model, and what is served.
        options: what to serve with: the plan's, with the choice in `ignored_layers`.
    """

    modules: tuple[ModuleFinding, ...]
    effects: Mapping[str, float]
    choice: Choice
    checks: Mapping[str, Check]
    saved_bytes: int
    served_bytes: int
    options: Mapping[str, Any]

    def by_kind(self) -> dict[str, list[ModuleFinding]]:
        """The modules that have the same name but for the layer's number, over depth."""
        kinds: dict[str, list[ModuleFinding]] = {}
        for one in self.modules:
            kinds.setdefault(one.module.kind, []).append(one)
        return kinds

    @property
    def holds(self) -> bool:
        return self.checks.get("held_out", self.checks["chosen_on"]).holds

    @property
    def server_argument(self) -> str:
        override = json.dumps({"quantization_config": dict(self.options)})
        return f"--json-model-override-args {shlex.quote(override)}"

    def as_dict(self) -> dict[str, Any]:
        return {
            "modules": [one.as_dict() for one in self.modules],
            "choice": {
                "ignored_layers": list(self.choice.names),
                "extra_bytes": self.choice.extra_bytes,
                "of_savings": self.choice.extra_bytes / self.saved_bytes,
                "of_model": self.choice.extra_bytes / self.served_bytes,
                "predicted_share": self.choice.predicted_share,
            },
            "checks": {
                name: {**asdict(check), "additivity": check.additivity, "holds": check.holds}
                for name, check in self.checks.items()
            },
            "holds": self.holds,
            "quantization_config": dict(self.options),
            "server_argument": self.server_argument,
        }


def effects_of(
    modules: Sequence[ServedModule], known: Measurements, groups: Groups
) -> dict[str, float]:
    """Each module's KL per token on the prompts that have a say."""
    return {
        one.name: groups.per_token(known.effects[one.name, Operand.BOTH], groups.chosen_on).value
        for one in modules
    }


def finding_of(
    modules: Sequence[ServedModule], plan: RefitPlan, known: Measurements, choice: Choice
) -> Finding:
    groups = Groups(known.samples)

    def found(module: ServedModule) -> ModuleFinding:
        kl = {
            operand: groups.per_token(known.effects[module.name, operand], groups.all)
            for operand in Operand
            if (module.name, operand) in known.effects
        }
        both = kl.pop(Operand.BOTH)
        alone = {operand.value: value for operand, value in kl.items()}
        is_exempt = module.name in choice.names
        return ModuleFinding(module, both, alone, known.fits[module.name], is_exempt)

    everything, rest = known.sets[()], known.sets[tuple(sorted(choice.names))]
    single = [known.effects[one.name, Operand.BOTH] for one in modules]
    total = [sum(values) for values in zip(*single, strict=True)]

    def check(prompts: set[int]) -> Check:
        return Check(
            prompts=len(prompts),
            tokens=groups.tokens(prompts),
            sum_of_effects=groups.per_token(total, prompts),
            everything=groups.per_token(everything, prompts),
            chosen=groups.per_token(rest, prompts),
            predicted_share=choice.predicted_share,
            share=groups.share(rest, everything, prompts),
        )

    parts = {"chosen_on": groups.chosen_on, "held_out": groups.held_out}
    return Finding(
        modules=tuple(found(one) for one in modules),
        effects=effects_of(modules, known, groups),
        choice=choice,
        checks={name: check(prompts) for name, prompts in parts.items() if prompts},
        saved_bytes=savings(modules),
        served_bytes=model_bytes(plan, modules),
        options=options_with(plan, choice.names),
    )


def options_with(plan: RefitPlan, ignored: Sequence[str]) -> dict[str, Any]:
    """The plan's options that are not defaults, and these modules added to `ignored_layers`."""
    given = Options.model_validate_json(json.dumps(plan.document["options"]))
    changed = given.model_dump(mode="json", exclude_defaults=True)
    return {**changed, "ignored_layers": [*changed.get("ignored_layers", []), *ignored]}
