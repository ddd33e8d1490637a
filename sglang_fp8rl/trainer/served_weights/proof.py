"""Proof that a model computes with what its server holds.

In three steps. The model runs, and is seen reading each parameter that is served in FP8 by the cast and by nothing
else: a forward that was set on a module, or a parent that reads its weight, goes past it. By bytes: what a weight as
served is, is the product of its parameter's codes and scales; and the fingerprint of these, and of everything that is
not FP8, is the server's.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ...numerics import dequantize, quantize
from ...wire.fingerprint import Fingerprint, Verification, compare
from ...wire.plan import UNUSED
from ...wire.sent_names import one_by_one
from ..fingerprint import Fingerprinter
from ..shards import full_tensors
from .modules import served
from .rules import ServedWeightsError, WeightRule, is_below, plain_name
from .swap import NOT_SERVED, plan_of, served_rules

_TOKENS = range(3, 35)


def check_as_served(
    model: nn.Module, server: Any, *, run: Callable[[nn.Module], Any] | None = None
) -> Verification:
    """Prove that the model computes with the bytes that the server holds now.

    It runs once, in the mode and under the autocast that it is in, without gradients. Every rank of a sharded
    model has to call this: weights are gathered.

    Args:
        server: a `RefitClient`, of one of the servers that sample.
        run: calls the model so that all that is served in FP8 computes; needed where its forward takes no
            `input_ids`.

    Returns:
        What was compared. What is not FP8, and is computed with in more digits than the server has of it (norms
        of an FP32 model), is `unproven`.

    Raises:
        ServedWeightsError: the server's plan is another than the model computes by; a weight that is
            held in FP8 could not be compared; a swapped module was replaced; or a module, or one that
            reads its weight, computes with something else.
        RefitError: names whose bytes differ.
    """
    plan, theirs = plan_of(model), server.plan()
    if theirs.digest != plan.digest:
        raise ServedWeightsError(
            type(model).__name__,
            f"it computes by the plan {plan.digest[:15]}…, the server's is {theirs.digest[:15]}…",
            "scales are shared as the server's plan says, so the model computes by that one",
            "Call compute_as_stored(model), then compute_as_served(model, fetch_plan(url)).",
        )
    unrounded = _check_run(model, run)
    found = compare(server.fingerprint(), fingerprint_of_served(model))
    found.check(type(model).__name__)
    for name, reason in found.unproven.items():
        entry = plan.tensors.get(name)
        if entry is not None and entry.block_size is not None:
            raise ServedWeightsError(
                name,
                reason,
                "every weight that is served in FP8 is compared",
                "Fetch the plan of this server: another tensor-parallel size shares other scales.",
            )
    left = found.compared - len(unrounded.keys() - found.unproven.keys())
    return replace(found, compared=left, unproven={**found.unproven, **unrounded})


def fingerprint_of_served(model: nn.Module, *, source: str = "the trainer") -> Fingerprint:
    """Of what swapped modules compute with, comparable with the server's. Raises as `check_as_served`."""
    numbers = Fingerprinter(plan_of(model))
    not_served, rules = getattr(model, NOT_SERVED), served_rules(model)
    model.state_dict()  # FSDP shards again what it gathered; a hook may put others into it
    held = (
        (plain_name(f"{name}.{leaf}"), one.detach())
        for name, module in model.named_modules(remove_duplicate=False)
        for leaf, one in _tensors_of(module)
    )
    for name, full in full_tensors(one for one in held if not is_below(one[0], not_served)):
        if name in rules:
            _check_computed_with(full, rules[name])
        numbers.add(name, full)
    return numbers.fingerprint(source)


def _check_computed_with(weight: torch.Tensor, rule: WeightRule) -> None:
    """What `served` gives to a forward pass is codes times scales, of the public cast."""
    options: Any = {"pow2_scale": rule.pow2_scale, "round_to_bf16": rule.round_to_bf16}
    columns = weight.shape[-1]
    used = served(weight, rule).reshape(-1, columns).chunk(rule.matrices)
    for one, computed in zip(weight.reshape(-1, columns).chunk(rule.matrices), used, strict=True):
        codes, scales = quantize(one, rule.block, name=rule.name, **options)
        expected = dequantize(codes, scales, rule.block)
        other = int((expected.view(torch.int16) != computed.view(torch.int16)).sum())
        if other:
            raise ServedWeightsError(
                rule.name,
                f"{other} of {expected.numel()} values that are computed with are not the cast's",
                "what is computed with is codes times scales in FP32, rounded to BF16",
                "Report it with the device and the dtype; numerics.through_fp8 takes a backend.",
            )


def _check_run(model: nn.Module, run: Callable[[nn.Module], Any] | None) -> dict[str, str]:
    """Run the model, and return what is not FP8 and computed with in more digits than are served, and how. Raises
    `ServedWeightsError` for a parameter that is computed with otherwise than as served, or not at all."""
    reads = _Reads(model)
    devices = {one.device for one in model.parameters() if one.is_cuda}
    as_it_is = torch.no_grad(), torch.random.fork_rng(devices), _buffers_kept(model)
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
            "read its weight, and hand over run= where the model does not call all of its modules by itself. By a plan "
            "with round_to_bf16: false, compute with the dtype that is kept.",
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


@contextmanager
def _buffers_kept(model: nn.Module) -> Iterator[None]:
    """Puts back what a model in train mode counts in (BatchNorm). Not what is no part of the state dict: a
    cache, and what the module knows of it."""
    held = [
        (module._buffers, leaf, one, one.clone())
        for module in model.modules()
        for leaf, one in _persistent_buffers(module)
    ]
    try:
        yield
    finally:
        for buffers, leaf, one, before in held:
            buffers[leaf] = one
            if not torch.equal(one, before):
                one.copy_(before)


def _persistent_buffers(module: nn.Module) -> list[tuple[str, torch.Tensor]]:
    """Those that are in the state dict."""
    leaves = module._buffers.keys() - module._non_persistent_buffers_set
    return [(leaf, one) for leaf in leaves if (one := module._buffers[leaf]) is not None]


def _tensors_of(module: nn.Module) -> list[tuple[str, torch.Tensor]]:
    """Its parameters and persistent buffers."""
    parameters = [(leaf, one) for leaf, one in module._parameters.items() if one is not None]
    return [*parameters, *_persistent_buffers(module)]


def _place(tensor: torch.Tensor) -> tuple[int, tuple[int, int]]:
    """Its memory, and there its first byte and the one behind its last."""
    reach = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    first = int(tensor.storage_offset()) * tensor.itemsize
    return tensor.untyped_storage()._cdata, (first, first + (reach + 1) * tensor.itemsize)


class _Reads(TorchDispatchMode):
    """Notes which operations read the parameters and persistent buffers of a model that runs.

    Attributes:
        wrong: parameters served in FP8 that something else than the cast reads.
        left: those that the cast has not read yet.
        unrounded: parameters and buffers not in FP8 that are read with more digits than are served.
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
        parameters = model.named_parameters(remove_duplicate=False)  # before FSDP gathers them
        self._kept = {plain_name(name): one.dtype for name, one in parameters}
        # Many may lie in one memory (ZeRO, apex): by it, and by the bytes that each has there.
        self._by_memory: dict[int, dict[tuple[int, int], tuple[nn.Module, str]]] = {}
        self._running: list[str] = []

    def hooks(self) -> Iterator[Any]:
        """On every module; each is taken off by leaving it."""
        for module in self._names:
            yield module.register_forward_pre_hook(self._begins)
            yield module.register_forward_hook(lambda *_: self._running.pop() and None)

    def _begins(self, module: nn.Module, args: Any) -> None:
        self._running.append(self._names[module] or "the model")
        for below in module.modules():  # FSDP has gathered them
            for leaf, one in _tensors_of(below):
                if not hasattr(one, "to_local"):
                    memory, place = _place(one)
                    self._by_memory.setdefault(memory, {})[place] = (below, leaf)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        options = kwargs or {}
        for one in () if getattr(func, "is_view", False) else tree_leaves((args, options)):
            if isinstance(one, torch.Tensor) and not hasattr(one, "to_local"):
                for name, held in self._held_by(one):
                    self._is_read(name, held, func, options)
        return func(*args, **options)

    def _held_by(self, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        """What lies in the bytes of a tensor: the one that is just these, or all that have some of them."""
        here = self._by_memory.get(tensor.untyped_storage()._cdata)
        if not here or not tensor.numel():
            return
        memory, (first, end) = _place(tensor)
        for place in [(first, end)] if (first, end) in here else list(here):
            module, leaf = here[place]
            held: Any = module._parameters.get(leaf, module._buffers.get(leaf))
            is_there = held is not None and _place(held) == (memory, place)
            if is_there and place[0] < end and first < place[1]:
                yield f"{self._names[module]}.{leaf}".lstrip("."), held

    def _is_read(
        self, name: str, held: torch.Tensor, func: Any, options: Mapping[str, Any]
    ) -> None:
        how = f"{func} in {self._running[-1] if self._running else 'no module'}"
        if func is torch.ops.sglang_fp8rl.served.default:
            self.left.discard(name)
            kept = self._kept[name]
            if not self._plan.rounding["round_to_bf16"] and held.itemsize < kept.itemsize:
                self.wrong.setdefault(name, f"{how} reads it in {held.dtype}, kept in {kept}")
            return
        if name in self._served:
            self.wrong.setdefault(name, f"{how} reads it as it is stored")
            return
        for one, part in one_by_one(name, held, self._plan):
            entry = self._plan.tensors.get(one)
            if entry is None or entry.scheme == UNUSED:
                continue
            dtype = getattr(torch, entry.dtype)
            is_rounded = func is torch.ops.aten._to_copy.default and options.get("dtype") == dtype
            if dtype == part.dtype or is_rounded or one in self.unrounded:
                continue
            if not torch.equal(part.to(dtype).to(part.dtype), part):
                self.unrounded[one] = f"read in {part.dtype} ({how}), served in {dtype}"
