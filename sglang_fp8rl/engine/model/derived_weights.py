"""Weights that SGLang derives from others after it loaded them: never stale, never moved.

MLA is the case that matters: `kv_b_proj` is served as `w_kc` and `w_vc`, plain attributes of the
attention module, computed by the model's `post_load_weights`, the last step of its `load_weights`. Here it is
called too where that step is not reached: after a replayed bucket, and after a call that failed half-way.
Some derivations bind a new tensor (`w_scale` of an FP8 `kv_b_proj` on every update), Kimi-K3's new containers
of them: `placed.py`.

Packed scales (`modules/method.py`) and copies that SGLang keeps of a weight (`kept_copies.py`) are made again
at the end of every update call, session or not.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch

from ...errors import HostError
from ...numerics.fingerprint import NumberTable, whole
from ..interception import unwatched
from ..modules.method import DecidedMethod, ServedWithPackedScales
from .gemma_norms import GemmaNorms
from .kept_copies import KeptCopies
from .parameters import Target, held_tensors
from .placed import KernelArguments, kept_in_place, kernel_arguments, names_of, owners_of

# Methods that write what they compute from weights: behind the loading, at the first forward pass (Gemma 4's
# router folds its scale into a norm), or behind the start (Inkling's shared experts are turned; later its
# loader does that, if it is given the parameter itself, and not a stand-in).
_BY_LOADING, _AT_FIRST_PASS = "post_load_weights", "fuse_scale"
_DERIVE = (_BY_LOADING, _AT_FIRST_PASS, "process_weights_after_loading")


class DerivedWeights:
    """Those of one model.

    Args:
        has_run: says whether it has computed anything since it was loaded.
        settle: brings its weights up to date, from which others are derived.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        has_run: Callable[[], bool] = lambda: True,
        settle: Callable[[], None] = lambda: None,
    ) -> None:
        self._model, self._has_run, self._settle = model, has_run, settle
        self._modules = dict(model.named_modules())
        self.kept_copies = KeptCopies({}, (), self._is_derived, has_run)
        methods = (getattr(module, "quant_method", None) for module in self._modules.values())
        self._methods = [method for method in methods if isinstance(method, DecidedMethod)]
        derivers = [
            _Deriver(prefix, module, method)
            for prefix, module in self._modules.items()
            for method in _DERIVE
            if callable(getattr(module, method, None))
        ]
        self._derivers = [one for one in derivers if one.needs_nothing]
        self._left = [one for one in derivers if not one.needs_nothing]
        self.norms = GemmaNorms(model)  # before loaders are wrapped
        self._derived_places = set(self.norms.places)
        self._is_held_back = self._is_deriving = self._are_placed = False
        self._arguments: list[KernelArguments] = []

    def note_loaded(self, weights: Sequence[Target]) -> None:
        """SGLang has loaded the model, nothing has run on it yet; `weights` are all that updates write."""
        self._arguments = kernel_arguments(self._modules)
        self.kept_copies = KeptCopies(self._modules, weights, self._is_derived, self._has_run)
        self.kept_copies.unproven |= {
            f"{one.prefix}.{one.method}".lstrip("."): "wants arguments, so no update calls it again"
            for one in self._left
            if one.is_used
        }

    def attach(self) -> None:
        """See which methods SGLang calls that derive weights, of the model or of any module in it.

        Side effects on the host: each is replaced by one that notes its call (an instance attribute).
        """
        for deriver in (*self._derivers, *self._left):
            setattr(deriver.module, deriver.method, functools.partial(self._called, deriver))

    def _called(self, deriver: _Deriver, *args: Any, **kwargs: Any) -> Any:
        if self._is_held_back:
            return None
        self._settle()
        deriver.is_used = deriver.is_used or not self._is_deriving
        if not deriver.needs_nothing:
            return deriver.native(*args, **kwargs)
        return self._derive(deriver, *args, **kwargs)

    def _derive(self, deriver: _Deriver, *args: Any, **kwargs: Any) -> Any:
        outer, self._is_deriving = self._is_deriving, True
        try:
            is_in_a_pass = deriver.method == _AT_FIRST_PASS and not self._are_placed
            places = self.in_place(from_now_on=self._are_placed)
            with unwatched(), nullcontext(()) if is_in_a_pass else places as moved:
                held = self._arguments if self._are_placed else []
                for one in held:
                    one.forget()
                try:
                    result = deriver.native(*args, **kwargs)
                    if not (deriver.is_checked or is_in_a_pass):  # a pass may be captured
                        self._check_repeatable(deriver, lambda: deriver.native(*args, **kwargs))
                finally:
                    for one in held:
                        one.put_back()
            self._derived_places |= {place for place, _ in moved}
            return result
        finally:
            self._is_deriving = outer

    def _check_repeatable(self, deriver: _Deriver, again: Callable[[], Any]) -> None:
        """A derivation has run for the first time; run it once more.

        Raises:
            HostError: it computed with what it writes, as LongCat-Flash scales its norms behind every call: what came
                in an earlier call of a refit would be changed a second time.
        """

        def numbers() -> dict[str, int]:
            held = held_tensors(deriver.module.named_modules())
            kinds = ((one.place, one.tensor.detach()) for one in held if not one.tensor.is_meta)
            return _numbers_of((place, one) for place, one in kinds if one.is_floating_point())

        before = numbers()
        again()
        for place, number in numbers().items():  # but for integers, which may count what happens
            if before.get(place) != number:
                raise HostError(
                    f"{deriver.prefix}.{place}" if deriver.prefix else place,
                    f"changed each time that {deriver.method} of {type(deriver.module).__name__} runs",
                    "SGLang runs it behind every call of load_weights, and a refit may have many",
                    "Serve this model by another quantization method.",
                )
        deriver.is_checked = True

    def _is_derived(self, place: str) -> bool:
        return place in self._derived_places or any(
            one.is_used and one.method == _AT_FIRST_PASS and place.startswith(f"{one.prefix}.")
            for one in self._derivers
        )

    def refresh(
        self, names: Iterable[str], *, natively: bool = False, are_served: bool = False
    ) -> None:
        """Derive again what depends on these weights, from the bytes that are served now.

        Args:
            natively: SGLang's own `load_weights` ran, and has derived what it derives.
            are_served: the names are those of the model's parameters, all that were written. SGLang looks for these;
                names as they were sent it knows only once its loader renamed them, as MistralLarge3's does.
        """
        used = [one for one in self._derivers if one.is_used]
        if natively:
            used = [one for one in used if one.method != _BY_LOADING]
        if not used or not (names := list(names)):
            return
        with torch.no_grad(), self.in_place():
            for deriver in used:
                limit = {"weight_names": names} if are_served and deriver.takes_names else {}
                self._derive(deriver, **limit)

    @contextmanager
    def held_back(self) -> Iterator[None]:
        """The model derives nothing in here, and keeps every tensor that it has: nothing is loaded."""
        self._is_held_back = True
        before = names_of(self._modules)
        held = [(owner, dict(owner)) for one in self._modules.values() for owner in owners_of(one)]
        try:
            yield
        finally:
            self._is_held_back = False
            for owner, content in held:
                owner.clear()
                owner.update(content)
            for old in before.values():
                old.bind()

    def end_of_update(self) -> None:
        """What no loader knows of: packed scales and copies."""
        for served in self._with_packed_scales():
            served.derive()
        self.kept_copies.renew()

    def renewed(self, names: Iterable[str]) -> list[str]:
        """Derive everything again, in place; which of it was not what these weights give.

        Returns:
            `module.attribute` of every derived tensor or copy that was stale and is right from now on.
        """
        self.kept_copies.look()
        is_used = any(one.is_used for one in self._derivers)
        packed = list(self._with_packed_scales())
        if not (is_used or packed or self.norms.places or self.kept_copies.copies):
            return []  # a walk over all that modules hold is most of what this takes
        before = _numbers_of(self._derived())
        self.norms.derive()
        self.refresh(names)
        self.end_of_update()
        after = _numbers_of(self._derived())
        return [place for place, number in after.items() if before.get(place, 0) != number]

    def _derived(self) -> Iterable[tuple[str, torch.Tensor]]:
        """Whatever is neither a parameter nor part of one, each memory once."""
        held = held_tensors(self._modules.items())
        found = [(o.place, o.tensor) for o in held if not isinstance(o.tensor, torch.nn.Parameter)]
        for served in self._with_packed_scales():
            found += [(f"{served.module}.{leaf}", one) for leaf, one in served.packed.items()]
        on_device = ((place, one) for place, one in found if one.device.type != "meta")
        return {(one.data_ptr(), one.shape): (place, one) for place, one in on_device}.values()

    def _with_packed_scales(self) -> Iterator[ServedWithPackedScales]:
        return (method.served for method in self._methods if method.served is not None)

    @contextmanager
    def in_place(self, *, from_now_on: bool = True) -> Iterator[list[tuple[str, torch.Tensor]]]:
        """As `kept_in_place`; nothing has its place yet while the model is loaded for the first time."""
        outer, self._are_placed = self._are_placed, from_now_on
        try:
            with kept_in_place(self._modules, puts_back=from_now_on) as moved:
                yield moved
        finally:
            self._are_placed = outer


class _Deriver:
    """A method of a module that writes what it computes from weights.

    Attributes:
        takes_names: of weights, and derives only what they lead to. A model inside another has other names.
        needs_nothing: can be called without arguments.
        is_used: SGLang calls it by itself.
        is_checked: it has run, and left the same when it ran again.
    """

    def __init__(self, prefix: str, module: torch.nn.Module, method: str) -> None:
        self.prefix, self.module, self.method = prefix, module, method
        self.native = getattr(module, method)
        parameters = inspect.signature(self.native).parameters
        self.takes_names = not prefix and "weight_names" in parameters
        self.needs_nothing = all(
            one.default is not one.empty or one.kind in (one.VAR_POSITIONAL, one.VAR_KEYWORD)
            for one in parameters.values()
        )
        self.is_used = self.is_checked = False


def _numbers_of(tensors: Iterable[tuple[str, torch.Tensor]]) -> dict[str, int]:
    """A number for each tensor, by its place."""
    by_place = dict(tensors)
    numbers = NumberTable([[whole(one, 0)] for one in by_place.values()]).numbers()
    return dict(zip(by_place, numbers, strict=True))
