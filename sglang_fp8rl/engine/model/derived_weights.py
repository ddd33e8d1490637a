"""Weights that SGLang derives from others after it loaded them: never stale, never moved.

MLA is the case that matters: `kv_b_proj` is served as `w_kc` and `w_vc`, plain attributes of the
attention module, computed by the model's `post_load_weights`. SGLang's own `load_weights` calls it as
its last step. Here it is called too where that step is not reached: after a replayed bucket, and
after a call that failed half-way, for what it had stored by then.

Packed scales (`packed_scales.py`) and copies that SGLang keeps of a weight (`kept_copies.py`) are made again
at the end of every update call, session or not.

CUDA graphs hold addresses. Some derivations bind a new tensor (`w_scale` of an FP8 `kv_b_proj` on every
update), so what changed its place during an update is copied back into the old one.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import torch

from ...errors import RefitError
from ...numerics.fingerprint import tensor_number
from ..interception import storage_of, unwatched
from .kept_copies import KeptCopies
from .parameters import held_tensors

# Methods that write what they compute from weights: behind the loading, or at the first forward pass
# (Gemma 4's router folds its scale into a norm).
_DERIVE = ("post_load_weights", "fuse_scale")


class DerivedWeights:
    """The derived weights of one model.

    Args:
        model: as SGLang built it, before or after its first load.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self._modules = dict(model.named_modules())
        self.kept_copies = KeptCopies(model, self._is_derived)
        methods = ((getattr(one, "quant_method", None), one) for one in self._modules.values())
        self._quantized: list[Any] = [pair for pair in methods if hasattr(pair[0], "served")]
        self._derivers = [
            _Deriver(prefix, module, method)
            for prefix, module in self._modules.items()
            for method in _DERIVE
            if callable(getattr(module, method, None))
        ]
        self._is_held_back = self._is_deriving = self._are_placed = False

    def attach(self) -> None:
        """See which methods SGLang calls that derive weights, of the model or of any module in it.

        Side effects on the host: each is replaced by one that notes its call (an instance attribute).
        """
        for deriver in self._derivers:
            setattr(deriver.module, deriver.method, functools.partial(self._called, deriver))

    def _called(self, deriver: _Deriver, *args: Any, **kwargs: Any) -> Any:
        if self._is_held_back:
            return None
        deriver.is_used = deriver.is_used or not self._is_deriving
        return self._derive(deriver, *args, **kwargs)

    def _derive(self, deriver: _Deriver, *args: Any, **kwargs: Any) -> Any:
        outer, self._is_deriving = self._is_deriving, True
        try:
            with unwatched(), self.in_place() if self._are_placed else nullcontext():
                return deriver.native(*args, **kwargs)
        finally:
            self._is_deriving = outer

    def _is_derived(self, place: str) -> bool:
        return any(one.is_used and place.startswith(f"{one.prefix}.") for one in self._derivers)

    @property
    def is_needed(self) -> bool:
        """Whether this model derives anything after loading."""
        return any(deriver.is_used for deriver in self._derivers)

    def refresh(self, names: Iterable[str]) -> None:
        """Derive again what depends on these weights, from the bytes that are served now."""
        names = list(names)
        if not names or not self.is_needed:
            return
        with torch.no_grad(), self.in_place():
            for deriver in self._derivers:
                if deriver.is_used:
                    self._derive(deriver, **deriver.told(names))

    @contextmanager
    def held_back(self) -> Iterator[None]:
        """The model derives nothing in here, and keeps every tensor that it has: nothing is loaded."""
        self._is_held_back = True
        before = self._bindings()
        try:
            yield
        finally:
            self._is_held_back = False
            for key, new in self._bindings().items():
                if key not in before:
                    del new.owner[new.leaf]
            for old in before.values():
                old.owner[old.leaf] = old.tensor

    def end_of_update(self) -> None:
        """What no loader knows of: packed scales (`modules/packed_scales.py`) and copies (`kept_copies.py`)."""
        self._pack_scales()
        self.kept_copies.renew()

    def renewed(self, names: Iterable[str]) -> list[str]:
        """Derive everything again, in place; which of it was not what these weights give.

        Returns:
            `module.attribute` of every derived tensor or copy that was stale and is right from now on.
        """
        before = {place: tensor_number(one, 0) for place, one in self._derived()}
        self.refresh(names)
        self.end_of_update()
        return [
            place for place, one in self._derived() if before.get(place, 0) != tensor_number(one, 0)
        ]

    def _derived(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Whatever is neither a parameter nor part of one, each memory once."""
        prefixes = {module: name for name, module in self._modules.items()}
        found = list(held_tensors(self._model))
        found += [(f"{prefixes[layer]}.{leaf}", one) for layer, leaf, one in self._packed_tensors()]
        found += [(f"a copy of weight {at}", copy) for at, (copy, _) in enumerate(self.kept_copies)]
        seen: set[tuple[int, torch.Size]] = set()
        for place, one in found:
            if one.device.type != "meta" and (one.data_ptr(), one.shape) not in seen:
                seen.add((one.data_ptr(), one.shape))
                yield place, one

    def _pack_scales(self) -> None:
        for method, layer in self._packed():
            method.derive(layer)

    def _packed_tensors(self) -> Iterator[tuple[torch.nn.Module, str, torch.Tensor]]:
        for method, layer in self._packed():
            for leaf, one in vars(method.served).items():
                if isinstance(one, torch.Tensor):
                    yield layer, leaf, one

    def _packed(self) -> Iterator[tuple[Any, torch.nn.Module]]:
        return (pair for pair in self._quantized if pair[0].served is not None)

    @contextmanager
    def in_place(self, *, from_now_on: bool = True) -> Iterator[list[tuple[str, torch.Tensor]]]:
        """Whatever tensor a module binds anew in here has its value in the old memory.

        Args:
            from_now_on: False while the model is loaded for the first time, and nothing has its place yet.

        Yields:
            a list that has, afterwards, `(module.attribute, tensor)` of all that was bound anew.

        Raises:
            RefitError: the new value does not fit there.
        """
        outer, self._are_placed = self._are_placed, from_now_on
        before = self._bindings()
        moved: list[tuple[str, torch.Tensor]] = []
        try:
            yield moved
        finally:
            self._are_placed = outer
            moved += self._moved(before, puts_back=from_now_on)

    def _bindings(self) -> dict[tuple[int, str], _Binding]:
        """Every tensor that a module has a name for, and the memory that it lies in."""
        found = {}
        for name, module in self._modules.items():
            owners: tuple[Any, ...] = (vars(module), module._buffers, module._parameters)
            for owner in owners:
                for attribute, value in owner.items():
                    if isinstance(value, torch.Tensor):
                        place = f"{name}.{attribute}" if name else attribute
                        found[id(owner), attribute] = _Binding(owner, place, value, value.data)
        return found

    def _moved(
        self, before: dict[tuple[int, str], _Binding], *, puts_back: bool
    ) -> Iterator[tuple[str, torch.Tensor]]:
        after = self._bindings()
        lost = [old.place for key, old in before.items() if key not in after] if puts_back else []
        if lost:
            raise RefitError(
                lost[0],
                "no tensor any more",
                "a derived weight keeps its shape, dtype and address, for captured graphs use it",
                "Restart the server on these weights.",
            )
        for key, new in after.items():
            old = before.get(key)
            if old is not None and old.tensor is new.tensor and _is_same(old.data, new.data):
                continue
            yield new.place, new.data
            if old is not None and puts_back:
                _put_back(old, new)


class _Deriver:
    """A method of a module that writes what it computes from weights.

    Attributes:
        is_used: whether SGLang calls it by itself.
    """

    def __init__(self, prefix: str, module: torch.nn.Module, method: str) -> None:
        self.prefix, self.module, self.method = prefix, module, method
        self.native = getattr(module, method)
        self.takes_names = "weight_names" in inspect.signature(self.native).parameters
        self.is_used = False

    def told(self, names: list[str]) -> dict[str, Any]:
        """Arguments that limit it to what these weights lead to; none: everything.

        A model inside another is given names that the outer one made of those that were sent.
        """
        return {"weight_names": names} if self.takes_names and not self.prefix else {}


class _Binding(NamedTuple):
    """A name of a module, and what it stood for: the object, and the memory that it had."""

    owner: dict[str, Any]
    place: str
    tensor: torch.Tensor
    data: torch.Tensor

    @property
    def leaf(self) -> str:
        return self.place.rpartition(".")[2]


def _is_same(old: torch.Tensor, new: torch.Tensor) -> bool:
    return (storage_of(old), old.storage_offset()) == (storage_of(new), new.storage_offset())


def _put_back(old: _Binding, new: _Binding) -> None:
    """Copy the new value into the old memory, and bind that again."""
    if not _fits(new.data, old.data):
        raise RefitError(
            old.place,
            f"{_described(new.data)} instead of {_described(old.data)}",
            "a derived weight keeps its shape, dtype and address, for captured graphs use it",
            "Restart the server on these weights.",
        )
    with torch.no_grad():
        old.data.copy_(new.data)
        if new.tensor is old.tensor:
            old.tensor.data = old.data
    old.owner[old.leaf] = old.tensor


def _fits(new: torch.Tensor, old: torch.Tensor) -> bool:
    return new.shape == old.shape and new.dtype == old.dtype and new.device == old.device


def _described(value: torch.Tensor) -> str:
    return f"{value.dtype} of shape {tuple(value.shape)}"
