"""Quantize on write: what happens between a model's `load_weights` and the served bytes.

`attach` puts one wrapper around the model's `load_weights` and one around every parameter's
`weight_loader`. All of SGLang's weight paths (checkpoint, tensors, flattened buckets, distributed,
IPC, disk, custom loaders) go through both.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from time import perf_counter
from typing import Any

import torch

from ..config import Options
from ..errors import Fp8RlError, HostError, RefitError
from ..numerics.fingerprint import MASK
from ..scheme import Scheme
from ..wire.plan import RefitPlan
from ..wire.stages import ANSWERING, LOADING
from .arrival.bucket import Bucket, apart, bucket_of, check_bucket
from .arrival.update import Origin, Update
from .extension import extensions
from .model.constants import Constants
from .model.derived_weights import DerivedWeights
from .model.landings import NameTable
from .model.parameters import ModelMemory, Target, set_loader, targets_of
from .model.plan_document import plan_document
from .model.sent_otherwise import load_left_experts, load_parts_singly
from .native.call import Call, Calls, StreamLane
from .native.checks import of_known_sizes
from .native.draft_writes import note_draft_write
from .native.loader_call import LoaderCalls
from .native.observer import Observer
from .native.pairs import PairTable
from .native.recording import Recording
from .replay.recipes import Recipe, RecipeStore, learn, replay
from .report.report import RefitReport


class ModelRefit:
    """Everything the plugin knows about one served model and its updates.

    Side effects on the host: `attach` replaces `model.load_weights` (an instance attribute) and
    each parameter's `weight_loader`, and leaves itself as `model.fp8rl_refit`.

    Args:
        probe_names: names of the checkpoint on `meta`, for a model that was not loaded from it.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        options: Options,
        schemes: dict[str, Scheme],
        probe_names: Callable[[], list[tuple[str, torch.Tensor]]],
    ) -> None:
        self.model, self.options, self.schemes = model, options, schemes
        self.targets = targets_of(model)
        self._devices = {target.parameter.device for target in self.targets.values()}
        # None for a model that is spread over several: its loaders copy tensor by tensor.
        self._device = next(iter(self._devices)) if len(self._devices) == 1 else None
        self.names, self.pairs = NameTable(), PairTable()
        self.derived = DerivedWeights(model)
        self.constants = Constants(model, self.derived)
        self.report = RefitReport(self.targets.values(), self.names)
        self.recipes = RecipeStore()
        self._probe_names = probe_names
        self.extensions = [kind(self) for kind in extensions()]
        self.calls = Calls(model, options, self.pairs, self.report, self.derived, self.extensions)
        self.during = self.calls.during
        self.runner: Any = None  # SGLang's, which counts forward passes
        self._looked_behind: bool | None = None
        self._loaders = LoaderCalls(options, self.pairs, self.report)
        self._load_weights = load_parts_singly(model)  # before its loaders are wrapped

    def attach(self) -> None:
        for target in self.targets.values():
            if isinstance(target.parameter, torch.nn.Parameter):
                self._wrap_loader(target)
        self.derived.attach()
        self.model.load_weights = self.load_weights  # type: ignore[assignment]
        self.model.fp8rl_refit = self  # type: ignore[assignment]

    def _wrap_loader(self, target: Target) -> None:
        from sglang.srt.model_loader.weight_utils import default_weight_loader

        parameter: Any = target.parameter
        native = getattr(parameter, "weight_loader", None) or default_weight_loader

        def weight_loader(_: Any, loaded_weight: torch.Tensor, *args: Any, **kwargs: Any) -> None:
            call, update = self.calls.running, self.calls.update
            given = target, native, loaded_weight, args, kwargs
            if call is None and update.origin.is_serving:
                stamp = self.report.log.stamp + (not update.calls)
                note_draft_write(self.report, *given, stamp)
            else:
                self._loaders.load(call, *given)

        set_loader(parameter, weight_loader)

    def memory_number(self) -> int:
        """One number for all that updates write: the same as long as no byte of it changes."""
        numbers = (
            (index + 1) * _sum_of_bytes(target.parameter.data)
            for index, target in enumerate(self._written())
            if target.parameter.device.type != "meta"
        )
        return sum(numbers) & MASK

    def wait_for_device(self) -> None:
        """A forward pass that SGLang overlaps with requests reads old codes with old scales to its end."""
        for device in self._devices:
            if device.type not in ("cpu", "meta"):
                torch.get_device_module(device).synchronize(device)

    def note_loaded(self) -> None:
        """SGLang has loaded and processed the model; nothing has run on it yet."""
        try:
            self.learned_names()
        except Fp8RlError as error:  # each refit says that it can't be judged
            self.report.unknown_because = str(error)
        self.derived.note_loaded(self._written())

    def _written(self) -> list[Target]:
        """Targets that updates write; every one, where nothing was loaded."""
        landings = [one for known in self.names.known.values() for one in known.landings]
        landed = {id(one.target.parameter) for one in landings} or set(self.targets)
        scales = {id(one.scale) for one in self.targets.values() if one.scale is not None}
        return [target for key, target in self.targets.items() if key in landed | scales]

    @contextmanager
    def unfolded(self) -> Iterator[None]:
        """The weights are as they were sent in here."""
        with ExitStack() as stack:
            for extension in self.extensions:
                stack.enter_context(extension.unfolded())
            yield

    def load_weights(self, weights: Any, *args: Any, **kw: Any) -> Any:
        """`model.load_weights`, with every write quantized and every name accounted for.

        Args:
            weights: `(name, tensor)` pairs, or a `FlatBucket`.

        Raises:
            RefitError: something that was sent was not stored. What was stored stays stored, and
                the status section says so.
        """
        with self.unfolded(), ExitStack() as behind, self.calls.one() as call:
            # What is queued at its end (halves that are kept) reads memory that the sender fills again.
            behind.callback(self.wait_for_device)
            origin, marks = call.update.origin, call.update.marks
            marks.append((LOADING, perf_counter()))
            may_replay = origin.may_replay and self.options.replay and not (args or kw)
            bucket, recipe = self._arrived(weights, may_replay=may_replay)
            self.calls.expect(call, bucket, recipe.brings if recipe is not None else None)
            if origin.is_serving:
                self._check_copies()
            if self._device is not None and self._device.type != "meta":
                call.lane = StreamLane(self._device).entered
            result: Any = None
            if bucket is None:
                result = self._load_natively(call, weights, *args, **kw)
            elif recipe is None:
                sent = apart(bucket)  # before anything is watched
                call.recording = Recording(bucket, sent) if may_replay else None
                result = self._load_natively(call, sent, *args, **kw)
                del sent
            else:
                replay(call, bucket, recipe, self.recipes, self.report)
                self.derived.refresh(bucket.names)
        if call.recording is not None:
            learn(self.recipes, call.recording, self.report, call, self.options)
        marks.append((ANSWERING, perf_counter()))
        return result

    def _check_copies(self) -> None:
        """Look before the first update, and the first behind a forward pass; raises what any look refused."""
        has_run = self.runner is None or self.runner.forward_pass_id > 0
        if self._looked_behind is not has_run:
            self.derived.kept_copies.look()
            self._looked_behind = has_run
        if self.derived.kept_copies.refusal is not None:
            raise self.derived.kept_copies.refusal

    def _arrived(self, weights: Any, *, may_replay: bool) -> tuple[Bucket | None, Recipe | None]:
        """What arrived, and how it is written without loaders."""
        bucket = bucket_of(weights)
        if bucket is None:
            return None, None
        if self._device is not None:
            bucket = bucket.on_device(self._device)
        recipe = self.recipes.find(bucket) if may_replay else None
        if recipe is None:
            check_bucket(bucket)
        return bucket, recipe

    def _load_natively(self, call: Call, weights: Any, *args: Any, **kw: Any) -> Any:
        """SGLang's own `load_weights`, and whatever it does watched; returns what that returns."""
        call.observer = observer = Observer(
            call.sources,
            ModelMemory(self.model, self.targets.values()),
            functools.partial(
                self._loaders.store, weakref.proxy(call)
            ),  # no circle: it holds the bucket
            call.raised,
            stores=call.update.origin.stores,
        )
        with (
            self.derived.in_place(from_now_on=call.update.origin.is_serving) as moved,
            observer.watching(),
        ):
            if call.update.origin.is_serving:
                weights = of_known_sizes(weights, self.names.known)
            result = self._load_weights(call.sources.watch(weights), *args, **kw)
            load_left_experts(self.model, call.sources.left(), self._load_weights)
        quantized = {one.name for one in self.targets.values() if one.is_fp8} if moved else ()
        for place, made_anew in moved:
            if place in quantized:
                raise RefitError(
                    place,
                    "made anew while SGLang loads it",
                    "what is served in FP8 is written by copies, which are cast with their scales",
                    "Add the module to ignored_layers.",
                )
            sources = call.sources.made_of(made_anew).sources
            observer.leave_native(sources, f"SGLang makes {place} anew while loading")
            call.sources.consume(sources)
        if not call.update.origin.is_serving:
            self.names.made_into(observer.native, call.sources.consumed)
        return result

    # -- the plan ----------------------------------------------------------------------------------

    @functools.cached_property
    def plan(self) -> RefitPlan:
        """The public document."""
        names = self.learned_names()
        more: dict[str, Any] = {}
        for kind in extensions():
            more |= kind.plan(self)
        document = plan_document(self.model, names, self.targets, self.schemes, self.options, more)
        return RefitPlan.from_dict(document)

    def learned_names(self) -> NameTable:
        """The checkpoint's names. Where nothing was loaded they go through the loaders on `meta`; nothing is stored.

        Raises:
            HostError: the loaders of this model need values.
        """
        if not self.names.is_filled:
            self._probe()
        return self.names

    def _probe(self) -> None:
        call = Call(Update(Origin.PROBE))
        try:
            with torch.no_grad(), self.derived.held_back(), self.calls.probing(call):
                self._load_natively(call, self._probe_names())
            self.calls.note_names(call)
        except Exception as error:
            # SGLang's loaders, on tensors without values: half of the names would be worse than none.
            self.names.forget()
            if isinstance(error, Fp8RlError):
                raise
            raise HostError(
                call.sources.latest_name or "the names of the checkpoint",
                f"{type(error).__name__}: {error}",
                "what a full refit writes is learnt from a load; SGLang's load_weights of this model "
                "can't be run without values",
                "Start the server on a checkpoint, not with --load-format dummy.",
            ) from error


def refit_of(model: Any) -> ModelRefit | None:
    """The bookkeeping of a model served with `fp8_blockwise_online`, else None."""
    return getattr(model, "fp8rl_refit", None)


def _sum_of_bytes(tensor: torch.Tensor) -> int:
    """Of its eight-byte words and what is left behind them: at the speed of memory, at every session's start."""
    data = tensor.contiguous().view(-1).view(torch.uint8)
    whole = 0 if data.storage_offset() % 8 else len(data) // 8 * 8
    words = data[:whole].view(torch.int64).sum() if whole else 0
    return int(words) + int(data[whole:].sum())
