"""What a model computes with, seen while it runs: by whom its modules are called, and what reads its parameters.

A swapped module computes as served when it is called through its class. A forward that was set on it, or a
parent that reads its weight, goes past that; nothing of it shows before the model runs.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ...numerics.sqnr import sqnr_db
from ...wire.sent_names import one_by_one
from .modules import served
from .rules import ServedWeightsError, plain_name
from .swap import plan_of, served_modules

_TOKENS = range(3, 35)
# Weights in FP8 leave about 31 dB between stored and served; another order of sums in BF16, more than 50.
_SAME_DB = 42.0


def check_run(model: nn.Module, run: Callable[[nn.Module], Any] | None) -> dict[str, str]:
    """Run the model, and return what is not FP8 and computed with in more digits than are served, and how.

    Args:
        run: calls the model so that all of its served modules compute; by itself it is given `input_ids`.

    Raises:
        ServedWeightsError: a module or parameter that is computed with otherwise than as served, or not at all.
    """
    seen = _Seen(model)
    devices = {one.device for one in model.parameters() if one.is_cuda}
    as_it_is = torch.no_grad(), torch.random.fork_rng(devices)
    with ExitStack() as stack:
        for context in (*as_it_is, torch.compiler.set_stance("force_eager"), *seen.hooks(), seen):
            stack.enter_context(context)
        (run or _run)(model)
    for name, text in (seen.wrong | dict.fromkeys(sorted(seen.left), "it was not called")).items():
        raise ServedWeightsError(
            name,
            text,
            "what is served in FP8 is computed with as served, by calling the module that holds it",
            "Call compute_as_served before a forward is set on a module (accelerate's hooks), have no other module "
            "read its weight, and hand over run= where the model does not call all of its modules by itself.",
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
        wrong: FP8 parameters that something reads as they are stored, and modules that give something else.
        left: modules that did not compute yet.
        unrounded: other parameters that are read with more digits than are served.
    """

    supports_higher_order_operators = True

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.wrong: dict[str, str] = {}
        self.unrounded: dict[str, str] = {}
        self._plan = plan_of(model)
        self._names = {module: plain_name(name) for name, module in model.named_modules()}
        self._rules = {module: weights for weights, module in served_modules(model)}
        self.left = {self._names[module] for module in self._rules}
        self._by_memory: dict[int, tuple[nn.Module, str]] = {}
        self._running: list[str] = []

    def hooks(self) -> Iterator[Any]:
        """On every module; each is taken off by leaving it."""
        for module in self._names:
            yield module.register_forward_pre_hook(self._begins)
            yield module.register_forward_hook(lambda *_: self._running.pop() and None)
        for (
            module
        ) in self._rules:  # before FSDP lets go of what it gathered, and casts what comes out
            yield module.register_forward_hook(self._compare, prepend=True, with_kwargs=True)

    def _begins(self, module: nn.Module, args: Any) -> None:
        self._running.append(self._names[module] or "the model")
        for below in module.modules():  # FSDP has gathered them
            for leaf, parameter in below._parameters.items():
                if parameter is not None and not hasattr(parameter, "to_local"):
                    self._by_memory[parameter.untyped_storage()._cdata] = (below, leaf)

    def _compare(self, module: Any, args: Any, kwargs: Any, out: Any) -> None:
        """With what the module's own class gives on the served weight."""
        name, stored = self._names[module], dict(module._parameters)
        for leaf, rule in self._rules[module].items():
            module._parameters[leaf] = served(stored[leaf], rule).to(stored[leaf].dtype)
        try:
            expected, found = (
                _flat(module.stored_class.forward(module, *args, **kwargs)),
                _flat(out),
            )
        finally:
            module._parameters.update(stored)
        same = sqnr_db(expected, found) if expected.shape == found.shape else -math.inf
        if same < _SAME_DB:
            self.wrong[name] = f"what it returns has {same:.1f} dB of what its own class gives"
        self.left.discard(name)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        for one in _read_by(func, args, kwargs or {}):
            if isinstance(one, torch.Tensor) and not hasattr(one, "to_local"):
                memory = one.untyped_storage()._cdata
                module, leaf = self._by_memory.get(memory, (None, ""))
                parameter: Any = module and module._parameters[leaf]
                if module is not None and parameter.untyped_storage()._cdata == memory:
                    self._is_read(module, leaf, func, kwargs or {})
        return func(*args, **kwargs or {})

    def _is_read(self, module: nn.Module, leaf: str, func: Any, options: Mapping[str, Any]) -> None:
        name, parameter = f"{self._names[module]}.{leaf}".lstrip("."), module._parameters[leaf]
        how = f"{func} in {self._running[-1] if self._running else 'no module'}"
        if leaf in self._rules.get(module, {}):
            self.wrong.setdefault(name, f"{how} reads it as it is stored")
            return
        for one, part in one_by_one(name, parameter, self._plan):
            entry = self._plan.tensors.get(one)
            dtype = getattr(torch, entry.dtype) if entry is not None else part.dtype
            is_rounded = func is torch.ops.aten._to_copy.default and options.get("dtype") == dtype
            if dtype == part.dtype or is_rounded or one in self.unrounded:
                continue
            if not torch.equal(part.to(dtype).to(part.dtype), part):
                self.unrounded[one] = f"read in {part.dtype} ({how}), served in {dtype}"


def _read_by(func: Any, args: Any, kwargs: Mapping[str, Any]) -> list[Any]:
    """What an operation computes with: all that it is given but what it writes to, or makes a view of."""
    if not isinstance(func, torch._ops.OpOverload):
        return tree_leaves((args, kwargs))
    if func is torch.ops.sglang_fp8rl.served.default or func.is_view:
        return []
    arguments = func._schema.arguments
    written = {one.name for one in arguments if one.alias_info and one.alias_info.is_write}
    given = {**dict(zip((one.name for one in arguments), args, strict=False)), **kwargs}
    return tree_leaves([value for name, value in given.items() if name not in written])


def _flat(result: Any) -> torch.Tensor:
    """All tensors of a result in one row, FP32, without NaN."""
    tensors = [one for one in tree_leaves(result) if isinstance(one, torch.Tensor)]
    return torch.cat([one.float().flatten() for one in tensors]).nan_to_num()
