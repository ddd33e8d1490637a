"""An exception in one call of ours, the first of its function, while a request is served."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch

INJECTED = "injected on purpose"
_OURS = "sglang_fp8rl.engine."
# What turns exceptions into answers, and the look at a model's attribute that says whether it is ours.
_NOT_IN, _NOT = "sglang_fp8rl.engine.host.boundary", "refit_of"
# Who makes a boundary or asks it holds the collectives that all ranks enter; what it calls beside them is
# seen by itself.
_BOUNDARY = {
    "Boundary",
    "is_fine",
    "gathered",
    "failures",
    "fail_behind",
    "_end_together",
    "_gathered",
    "end_by_flush",
    "asked",
    "end_weight_update",
}


class InjectedError(RuntimeError):
    """Nothing in the package knows it."""


def traced(*call: Any) -> tuple[Any, list[str]]:
    """What a call `(act, *args)` answers, and the functions of the package that it called, in order."""
    found: dict[str, None] = {}

    def see(frame: Any, event: str, _: Any) -> None:
        if event == "call" and _is_inside(frame):
            found.setdefault(_name(frame))

    sys.setprofile(see)
    try:
        answer = _made(call)
    finally:
        sys.setprofile(None)
    return answer, list(found)


def injected(name: str, *call: Any) -> Any:
    """What a call `(act, *args)` answers where its first call of `name` raises."""

    def see(frame: Any, event: str, _: Any) -> None:
        if event == "call" and _is_inside(frame) and _name(frame) == name:
            sys.setprofile(None)
            raise InjectedError(INJECTED)

    sys.setprofile(see)
    try:
        return _made(call)
    finally:
        sys.setprofile(None)


def _made(call: Sequence[Any]) -> Any:
    act, *args = call
    return act(*args)


def traced_in(scheduler: Any, act: Callable[..., Any], *args: Any) -> tuple[Any, list[str]]:
    """`traced`, as an engine's ranks run it."""
    return traced(act, scheduler, *args)


def injected_in(scheduler: Any, name: str, rank: int, act: Callable[..., Any], *args: Any) -> Any:
    """`injected` on that rank of an engine alone."""
    if torch.distributed.get_rank() != rank:
        return act(scheduler, *args)
    return injected(name, act, scheduler, *args)


def _is_inside(frame: Any) -> bool:
    """Whether it is a call below a hook. Generators are left out: nothing else raises where they resume."""
    module = frame.f_globals.get("__name__", "")
    is_ours = module.startswith(_OURS) and module != _NOT_IN and frame.f_code.co_name != _NOT
    is_made = frame.f_code.co_filename == "<string>"  # by `dataclass`
    is_generator = frame.f_code.co_flags & (inspect.CO_GENERATOR | inspect.CO_COROUTINE)
    is_boundary = _BOUNDARY & {*frame.f_code.co_names}
    return is_ours and not (is_made or is_generator or is_boundary) and frame.f_code not in _hooks()


@functools.cache
def _hooks() -> frozenset[Any]:
    """What SGLang calls: hooks, and of a class in place of SGLang's, methods and what they hand their request to."""
    from sglang_fp8rl.engine.host.hooks import HOOKS

    functions = []
    for hook in HOOKS:
        if not isinstance(hook.function, type):
            functions.append(hook.function)
            continue
        methods = [one for one in vars(hook.function).values() if inspect.isfunction(one)]
        names = {name for method in methods for name in method.__code__.co_names}
        handed = [methods[0].__globals__.get(name) for name in names]
        functions += [*methods, *filter(inspect.isfunction, handed)]
    return frozenset(function.__code__ for function in functions)


def _name(frame: Any) -> str:
    module = frame.f_globals["__name__"].removeprefix(_OURS)
    return f"{module}:{frame.f_code.co_qualname}"
