"""Weights that SGLang derives from others after it loaded them: never stale, never moved.

MLA is the case that matters: `kv_b_proj` is served as `w_kc` and `w_vc`, plain attributes of the
attention module, computed by the model's `post_load_weights`. SGLang's own `load_weights` calls it as
its last step. Here it is called too where that step is not reached: after a replayed bucket, and
after a call that failed half-way, for what it had stored by then.

Packed scales (`ue8m0.py`) and copies that SGLang keeps of a weight (`kept_copies.py`) are made again
at the end of every update call, session or not.

CUDA graphs hold addresses. Some derivations bind a new tensor (`w_scale` of an FP8 `kv_b_proj` on every
update), so what changed its place during an update is copied back into the old one.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ...errors import RefitError
from ...numerics.fingerprint import tensor_number
from .kept_copies import KeptCopies

_Place = tuple[torch.nn.Module, str]


class DerivedWeights:
    """The derived weights of one model.

    Args:
        model: as SGLang built it, before or after its first load.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self._modules = dict(model.named_modules())
        self._kept_copies = KeptCopies(model)
        methods = ((getattr(one, "quant_method", None), one) for one in self._modules.values())
        self._quantized: list[Any] = [pair for pair in methods if hasattr(pair[0], "served")]
        self._derive: Any = getattr(model, "post_load_weights", None)
        self._takes_names = self._derive is not None and (
            "weight_names" in inspect.signature(self._derive).parameters
        )

    @property
    def is_needed(self) -> bool:
        """Whether this model derives anything after loading."""
        return self._derive is not None

    def refresh(self, names: Iterable[str]) -> None:
        """Derive again what depends on these weights, from the bytes that are served now."""
        names = list(names)
        if self._derive is None or not names:
            return
        with torch.no_grad(), self.in_place():
            if self._takes_names:
                self._derive(weight_names=names)
            else:
                self._derive()

    @contextmanager
    def held_back(self) -> Iterator[None]:
        """The model derives nothing in here: SGLang's `load_weights` does it as its last step."""
        if self._derive is None:
            yield
            return
        self._model.post_load_weights = lambda *_, **__: None  # type: ignore[assignment]
        try:
            yield
        finally:
            del self._model.post_load_weights

    def end_of_update(self) -> None:
        """What no loader knows of: packed scales (`modules/packed_scales.py`) and copies (`kept_copies.py`)."""
        self._pack_scales()
        self._kept_copies.renew()

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
        found = [(f"{prefixes[module]}.{leaf}", one) for (module, leaf), one in self._tensors()]
        found += [(f"{prefixes[layer]}.{leaf}", one) for layer, leaf, one in self._packed_tensors()]
        found += [
            (f"a copy of weight {at}", copy) for at, (copy, _) in enumerate(self._kept_copies)
        ]
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
    def in_place(self) -> Iterator[None]:
        """Whatever tensor attribute a module binds anew in here has its value in the old memory.

        Raises:
            RefitError: the new value does not fit there.
        """
        before = dict(self._tensors())
        try:
            yield
        finally:
            self._put_back(before)

    def _put_back(self, before: dict[_Place, torch.Tensor]) -> None:
        for (module, attribute), old in before.items():
            new: Any = vars(module).get(attribute, module._buffers.get(attribute))
            if new is old:
                continue
            if not _fits(new, old):
                raise RefitError(
                    f"{self._name_of(module)}.{attribute}",
                    f"{_described(new)} instead of {_described(old)}",
                    "a derived weight keeps its shape, dtype and address, for captured graphs use it",
                    "Restart the server on these weights.",
                )
            with torch.no_grad():
                old.copy_(new)
            setattr(module, attribute, old)

    def _tensors(self) -> Iterator[tuple[_Place, torch.Tensor]]:
        """Tensors that are neither parameters nor part of one: attributes and buffers."""
        for module in self._modules.values():
            for attributes in (vars(module), module._buffers):
                for attribute, value in attributes.items():
                    if isinstance(value, torch.Tensor) and not isinstance(
                        value, torch.nn.Parameter
                    ):
                        yield (module, attribute), value

    def _name_of(self, module: torch.nn.Module) -> str:
        return next(name for name, one in self._modules.items() if one is module)


def _fits(new: Any, old: torch.Tensor) -> bool:
    return (
        isinstance(new, torch.Tensor)
        and new.shape == old.shape
        and new.dtype == old.dtype
        and new.device == old.device
    )


def _described(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{value.dtype} of shape {tuple(value.shape)}"
    return repr(value)
