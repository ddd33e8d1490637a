"""Make a model compute as its server does, and back. Modules change their class and nothing else."""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterable, Iterator
from types import MethodType
from typing import Any

from torch import nn

from ...wire.plan import RefitPlan
from .modules import ServedExperts, ServedLinear, lent_weight
from .rules import ServedWeightsError, WeightRule, plain_name, rules_of

# Attributes of a swapped module, and of the model: the arguments that it was swapped by.
_RULES, _PLAN, NOT_SERVED = "served_rules", "served_plan", "served_without"


def compute_as_served(
    model: nn.Module, plan: RefitPlan, *, not_served: Collection[str] = ()
) -> list[str]:
    """Have every module whose weight the plan's server holds in FP8 compute with what it holds.

    Gradients go straight through the cast; parameters, their names, hooks and optimizers are as they
    were. Before or after `fully_shard`, before or after `load_state_dict`.

    Args:
        model: whole, under the names of its checkpoint. Not a reference model whose log-probabilities
            are to be those of its BF16 weights.
        plan: of the server that samples (`fetch_plan`).
        not_served: names of modules that the server has not, such as a value head.

    Returns:
        Names of the swapped modules.

    Raises:
        ServedWeightsError: it computes so already; the plan is of another model; or a forward was set on a
            module. Nothing is changed then.
    """
    if hasattr(model, _PLAN) or any(served_modules(model)):
        raise ServedWeightsError(
            type(model).__name__,
            f"it computes as served already, and is given the plan {plan.digest[:15]}…",
            "a model computes by one plan",
            "Call compute_as_stored first (on the model that was swapped), then again with the new plan.",
        )
    found = rules_of(model, plan, not_served)
    _check_computes_by_class([(name, module) for name, module, _ in found], "compute_as_served")
    classes: list[Any] = []
    for _, module, weights in found:  # it may raise, and then no module is changed
        cls: Any = type(module)
        classes.append(_served_class(cls, tuple(weights)))
    for (_, module, weights), cls in zip(found, classes, strict=True):
        _change_class(module, cls)
        setattr(module, _RULES, weights)
    setattr(model, _PLAN, plan)
    setattr(model, NOT_SERVED, tuple(not_served))
    return [name for name, _, _ in found]


def compute_as_stored(model: nn.Module) -> None:
    """Have the model compute with its own parameters again, in the classes that it had. Raises `ServedWeightsError`
    where it does so already, or a forward was set on a module; nothing is changed then."""
    plan_of(model)
    names = {module: name for name, module in model.named_modules()}
    swapped = [module for _, module in served_modules(model)]
    _check_computes_by_class([(names[one], one) for one in swapped], "compute_as_stored")
    for module in swapped:
        _change_class(module, _stored_class(type(module)))
        delattr(module, _RULES)
    delattr(model, _PLAN)
    delattr(model, NOT_SERVED)


def _check_computes_by_class(modules: Iterable[tuple[str, nn.Module]], function: str) -> None:
    """Raises `ServedWeightsError` for a module whose own `forward` is another than its class's."""
    for name, module in modules:
        if vars(module).get("forward") not in (None, MethodType(type(module).forward, module)):
            raise ServedWeightsError(
                plain_name(name),
                "a forward was set on the module itself, as accelerate's hooks do",
                "modules change their class, and such a forward goes on with the one that it was made of",
                f"Take it off (accelerate.hooks.remove_hook_from_module), call {function}, and set it again.",
            )


def _change_class(module: nn.Module, cls: Any) -> None:
    if "forward" in vars(module):  # its class's, which taking off a hook has left there
        delattr(module, "forward")
    module.__class__ = cls


def plan_of(model: nn.Module) -> RefitPlan:
    """The plan that the model computes by. Raises `ServedWeightsError` if there is none."""
    plan = getattr(model, _PLAN, None)
    if plan is None:
        raise ServedWeightsError(
            type(model).__name__,
            "it computes with its own parameters",
            "a model computes by a plan from compute_as_served(model, plan) on",
            "Call that first; hand over the model that was swapped, not a wrapper or a part of it.",
        )
    return plan


def served_modules(model: nn.Module) -> Iterator[tuple[dict[str, WeightRule], nn.Module]]:
    """The modules that compute as served, with the rules of their parameters."""
    for module in model.modules():
        if isinstance(module, (ServedLinear, ServedExperts)):
            yield module.served_rules, module


def served_rules(model: nn.Module) -> dict[str, WeightRule]:
    """The rules of all parameters that the plan's server holds in FP8, by name. Raises `ServedWeightsError` where
    a module that was swapped has been replaced since."""
    swapped = {module: rules for rules, module in served_modules(model)}
    found = rules_of(model, plan_of(model), getattr(model, NOT_SERVED))
    for _, module, rules in found:
        if swapped.get(module) != rules:
            raise ServedWeightsError(
                next(rule.name for rule in rules.values()),
                f"in a {type(module).__name__} that compute_as_served has not made",
                "what is served in FP8 is computed with by the modules that were swapped",
                "Replace modules (as FP8 training of torchao or accelerate does) elsewhere only; or call "
                "compute_as_stored(model), then compute_as_served(model, plan) again.",
            )
    return {rule.name: rule for _, _, rules in found for rule in rules.values()}


@functools.cache
def _served_class(cls: type[nn.Module], leaves: tuple[str, ...]) -> type[nn.Module]:
    content: dict[str, Any] = {"__module__": __name__, "stored_class": cls}
    content["__reduce_ex__"] = _reduced
    if issubclass(cls, nn.Linear) and cls.forward is nn.Linear.forward:
        return type(f"Served{cls.__name__}", (ServedLinear, cls), content)
    content |= {leaf: lent_weight(leaf) for leaf in leaves}
    return type(f"Served{cls.__name__}", (ServedExperts, cls), content)


def _reduced(module: Any, protocol: int) -> Any:
    """For pickle, which looks classes up by name: the swapped class is made again where it is loaded."""
    cls: Any = type(module)
    whole: Any = object.__reduce_ex__(module, 2)
    # Not of what fully_shard derives from it, nor of a class that has a way of its own.
    if "stored_class" not in vars(cls) or cls.__reduce__ is not object.__reduce__:
        return whole
    return _new_served, (cls.stored_class, tuple(module.served_rules)), *whole[2:]


def _new_served(cls: Any, leaves: tuple[str, ...]) -> Any:
    made = _served_class(cls, leaves)
    return made.__new__(made)


def _stored_class(cls: type) -> type:
    """The class that was swapped; under what was derived from it since, as `fully_shard` does."""
    if "stored_class" in vars(cls):
        return vars(cls)["stored_class"]
    bases = tuple(_stored_class(b) if hasattr(b, "stored_class") else b for b in cls.__bases__)
    content = {k: v for k, v in vars(cls).items() if k not in ("__dict__", "__weakref__")}
    return type(cls)(cls.__name__, bases, content)
