"""What a model computes with, seen while it runs: who calls which module, and what reads which parameter.

A module that was swapped computes as served when it is called through its class. A `forward` that was set on it, or
a parent that reads its weight, goes past that; nothing of it shows before the model runs.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from itertools import zip_longest
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ...numerics.sqnr import sqnr_db
from ...wire.plan import UNUSED, RefitPlan
from ...wire.sent_names import one_by_one
from .modules import served
from .rules import ServedWeightsError, plain_name
from .swap import plan_of, served_modules

_TOKENS = range(3, 35)
# Weights in FP8 leave about 31 dB between stored and served; another order of sums in BF16, more than 50.
_SAME_DB = 42.0


def check_run(model: nn.Module, run: Callable[[nn.Module], Any] | None) -> dict[str, str]:
    """Run the model, and look what it computes with.

    Args:
        run: calls the model so that it computes with all of its served modules; by itself it is given `input_ids`.

    Returns:
        Parameters in high precision that are computed with in more digits than are served, and how.

    Raises:
        ServedWeightsError: a module or parameter that is computed with otherwise than as served, or not at all.
    """
    seen = _Seen(model)
    devices = {one.device for one in model.parameters() if one.is_cuda}
    with ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        stack.enter_context(torch.random.fork_rng(devices))
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        for hook in seen.hooks():
            stack.enter_context(hook)
        stack.enter_context(seen)
        (run or _run)(model)
    for name, how in seen.stored.items():
        raise ServedWeightsError(
            name,
            f"{how} reads it as it is stored",
            "what is served in FP8 is computed with as served: by calling the module that holds it",
            "Call compute_as_served before a forward is set on a module (accelerate's hooks), and have no other "
            "module read its weight; or name the layer in the server's ignored_layers.",
        )
    for name, text in seen.otherwise.items():
        raise ServedWeightsError(
            name,
            text,
            "a module computes what its own class does with the served weight",
            "Take off what was set on the module (a forward, a hook), call compute_as_served, and set it again.",
        )
    for name in seen.left:
        raise ServedWeightsError(
            name,
            "it was not called while the model ran",
            "every module that is served in FP8 is seen computing",
            "Hand over run=, which calls the model so that all of its modules compute.",
        )
    return seen.unrounded


def _run(model: nn.Module) -> None:
    if "input_ids" not in inspect.signature(model.forward).parameters:
        raise ServedWeightsError(
            type(model).__name__,
            "its forward takes no input_ids",
            "what a model computes with is seen while it runs",
            "Hand over run=, a function that calls the model.",
        )
    model(input_ids=torch.tensor([list(_TOKENS)], device=next(model.parameters()).device))


class _Seen(TorchDispatchMode):
    """Watches a model that runs.

    Attributes:
        stored: FP8 parameters that something reads as they are, and what.
        otherwise: modules that computed something else than with their served weights.
        left: modules that did not compute yet.
        unrounded: other parameters with digits that are not served, and what read them so.
    """

    supports_higher_order_operators = True

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.stored: dict[str, str] = {}
        self.otherwise: dict[str, str] = {}
        self.unrounded: dict[str, str] = {}
        self._plan = plan_of(model)
        self._names = {module: plain_name(name) for name, module in model.named_modules()}
        self._rules = {module: weights for weights, module in served_modules(model)}
        self.left = [self._names[module] for module in self._rules]
        self._finer: dict[str, dict[str, torch.dtype]] = {}
        self._by_memory: dict[int, tuple[nn.Module, str]] = {}
        self._running: list[str] = []

    def hooks(self) -> Iterator[Any]:
        """On every module; each is taken off by leaving it."""
        for module in self._names:
            yield module.register_forward_pre_hook(self._begins)
            yield module.register_forward_hook(self._ends, always_call=True)
        for (
            module
        ) in self._rules:  # before FSDP takes the parameters away, and others change what comes out
            yield module.register_forward_hook(self._compare, prepend=True, with_kwargs=True)

    def _begins(self, module: nn.Module, args: Any) -> None:
        self._running.append(self._names[module])
        for below in module.modules():  # FSDP has gathered them
            for leaf, parameter in below._parameters.items():
                if parameter is not None and not hasattr(parameter, "to_local"):
                    self._by_memory[parameter.untyped_storage()._cdata] = (below, leaf)

    def _ends(self, module: nn.Module, args: Any, out: Any) -> None:
        self._running.pop()

    def _compare(self, module: Any, args: Any, kwargs: Any, out: Any) -> None:
        """With what the module's own class gives for the served weight."""
        name, stored = self._names[module], dict(module._parameters)
        for leaf, rule in self._rules[module].items():
            module._parameters[leaf] = served(stored[leaf], rule).to(stored[leaf].dtype)
        try:
            expected = module.stored_class.forward(module, *args, **kwargs)
        finally:
            module._parameters.update(stored)
        if name in self.left:
            self.left.remove(name)
        difference = _difference(expected, out)
        if difference:
            self.otherwise[name] = difference

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        for one in _read_by(func, args, kwargs):
            if isinstance(one, torch.Tensor) and not hasattr(one, "to_local"):
                memory = one.untyped_storage()._cdata
                module, leaf = self._by_memory.get(memory, (None, ""))
                parameter: Any = None if module is None else module._parameters[leaf]
                if module is not None and parameter.untyped_storage()._cdata == memory:
                    self._note(module, leaf, parameter, func, kwargs)
        return func(*args, **kwargs)

    def _note(
        self, module: nn.Module, leaf: str, parameter: Any, func: Any, kwargs: Mapping[str, Any]
    ) -> None:
        """An operation reads a parameter."""
        name = f"{self._names[module]}.{leaf}".lstrip(".")
        how = f"{func} in {self._running[-1] if self._running[-1:] != [''] else 'the model'}"
        if leaf in self._rules.get(module, {}):
            self.stored.setdefault(name, how)
            return
        if name not in self._finer:
            self._finer[name] = _finer_than_served(name, parameter, self._plan)
        for one, dtype in self._finer[name].items():
            if func is not torch.ops.aten._to_copy.default or kwargs.get("dtype") != dtype:
                text = f"computed with in {parameter.dtype} ({how}), served in {dtype}"
                self.unrounded.setdefault(one, text)


def _read_by(func: Any, args: Any, kwargs: Mapping[str, Any]) -> list[Any]:
    """What an operation computes with: all that it is given but what it writes to, or looks at otherwise."""
    if not isinstance(func, torch._ops.OpOverload):
        return tree_leaves((args, kwargs))
    if func is torch.ops.sglang_fp8rl.served.default or func.is_view:
        return []
    arguments = func._schema.arguments
    given = {**dict(zip((one.name for one in arguments), args, strict=False)), **kwargs}
    written = {one.name for one in arguments if one.alias_info and one.alias_info.is_write}
    return tree_leaves([value for name, value in given.items() if name not in written])


def _finer_than_served(name: str, parameter: Any, plan: RefitPlan) -> dict[str, torch.dtype]:
    """Of a parameter that is not FP8 on the server: names whose values it rounds, and to what."""
    found = {}
    for one, part in one_by_one(name, parameter.detach(), plan):
        entry = plan.tensors.get(one)
        if entry is not None and entry.block_size is None and entry.scheme != UNUSED:
            dtype: torch.dtype = getattr(torch, entry.dtype)
            if not torch.equal(part.to(dtype).to(part.dtype), part):
                found[one] = dtype
    return found


def _difference(expected: Any, found: Any) -> str:
    """Between two results, in words; empty if there is none but another order of sums."""
    pairs = list(zip_longest(tree_leaves(expected), tree_leaves(found)))
    for one, other in pairs:
        if not isinstance(one, torch.Tensor):
            continue
        if not isinstance(other, torch.Tensor) or one.shape != other.shape:
            return "it returns another number of values than its class does"
        found_db = sqnr_db(*(value.float().nan_to_num() for value in (one, other)))
        if found_db < _SAME_DB:
            return f"what it returns has {found_db:.1f} dB of what its class gives"
    return ""
