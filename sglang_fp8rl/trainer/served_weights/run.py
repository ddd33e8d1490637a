"""What a model computes with, seen while it runs.

A parameter that is served in FP8 is read by the cast and by nothing else, and each of them is. A forward that was
set on a module, or a parent that reads its weight, goes past the cast; nothing of it shows before the model runs.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ...wire.sent_names import one_by_one
from .rules import ServedWeightsError, plain_name
from .swap import plan_of, served_rules

_TOKENS = range(3, 35)


def check_run(model: nn.Module, run: Callable[[nn.Module], Any] | None) -> dict[str, str]:
    """Run the model, and return what is not FP8 and computed with in more digits than are served, and how.

    Args:
        run: calls the model so that all that is served in FP8 computes; by itself it is given `input_ids`.

    Raises:
        ServedWeightsError: a parameter that is computed with otherwise than as served, or not at all.
    """
    reads = _Reads(model)
    devices = {one.device for one in model.parameters() if one.is_cuda}
    as_it_is = torch.no_grad(), torch.random.fork_rng(devices)
    with ExitStack() as stack:
        for context in (*as_it_is, torch.compiler.set_stance("force_eager"), *reads.hooks(), reads):
            stack.enter_context(context)
        (run or _run)(model)
    left = dict.fromkeys(sorted(reads.left), "the cast did not read it")
    for name, text in (reads.wrong or left).items():
        raise ServedWeightsError(
            name,
            text,
            "what is served in FP8 is computed with as served, by calling the module that holds it",
            "Call compute_as_served before a forward is set on a module (accelerate's hooks), have no other module "
            "read its weight, and hand over run= where the model does not call all of its modules by itself.",
        )
    return reads.unrounded


def _run(model: nn.Module) -> None:
    if "input_ids" not in inspect.signature(model.forward).parameters:
        raise ServedWeightsError(
            type(model).__name__,
            "its forward takes no input_ids",
            "what a model computes with is seen while it runs",
            "Hand over run=, a function that calls the model.",
        )
    model(input_ids=torch.tensor([list(_TOKENS)], device=next(model.parameters()).device))


class _Reads(TorchDispatchMode):
    """Notes which operations read the parameters of a model that runs.

    Attributes:
        wrong: parameters served in FP8 that something else than the cast reads.
        left: those that the cast has not read yet.
        unrounded: other parameters that are read with more digits than are served.
    """

    supports_higher_order_operators = True

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.wrong: dict[str, str] = {}
        self.unrounded: dict[str, str] = {}
        self._plan = plan_of(model)
        self._names = {module: plain_name(name) for name, module in model.named_modules()}
        self._served = served_rules(model).keys()
        self.left = set(self._served)
        self._by_memory: dict[int, tuple[nn.Module, str]] = {}
        self._running: list[str] = []

    def hooks(self) -> Iterator[Any]:
        """On every module; each is taken off by leaving it."""
        for module in self._names:
            yield module.register_forward_pre_hook(self._begins)
            yield module.register_forward_hook(lambda *_: self._running.pop() and None)

    def _begins(self, module: nn.Module, args: Any) -> None:
        self._running.append(self._names[module] or "the model")
        for below in module.modules():  # FSDP has gathered them
            for leaf, parameter in below._parameters.items():
                if parameter is not None and not hasattr(parameter, "to_local"):
                    self._by_memory[parameter.untyped_storage()._cdata] = (below, leaf)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        options = kwargs or {}
        for one in () if getattr(func, "is_view", False) else tree_leaves((args, options)):
            if isinstance(one, torch.Tensor) and not hasattr(one, "to_local"):
                memory = one.untyped_storage()._cdata
                module, leaf = self._by_memory.get(memory, (None, ""))
                parameter: Any = module and module._parameters[leaf]
                if module is not None and parameter.untyped_storage()._cdata == memory:
                    name = f"{self._names[module]}.{leaf}".lstrip(".")
                    self._is_read(name, parameter, func, options)
        return func(*args, **options)

    def _is_read(
        self, name: str, parameter: torch.Tensor, func: Any, options: Mapping[str, Any]
    ) -> None:
        how = f"{func} in {self._running[-1] if self._running else 'no module'}"
        if func is torch.ops.sglang_fp8rl.served.default:
            self.left.discard(name)
            return
        if name in self._served:
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
