"""Quantize on write: what happens between a model's `load_weights` and the served bytes.

`attach` puts one wrapper around the model's `load_weights` and one around every parameter's
`weight_loader`. All of SGLang's weight paths (checkpoint, tensors, flattened buckets, distributed,
IPC, disk, custom loaders) go through both.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch

from ..config import Options
from ..numerics.runners import warm_up
from ..scheme import Scheme
from ..wire.plan import RefitPlan
from .arrival.bucket import TensorBucket, bucket_of
from .arrival.kinds import KnownBucket, NewBucket, Stream, has_packed_pairs
from .arrival.on_device import on_device
from .arrival.packed_pairs import split_pairs
from .arrival.sender_memory import SenderMemory
from .arrival.update_scope import PROBE, UpdateScope
from .audit import Audit
from .journal import Arrival, Journal, Update, outside_of_a_call
from .kv_scales.calibration import Calibration
from .kv_scales.kv_scales import KvScales
from .kv_scales.sent_scales import SentScales
from .model.derived_weights import DerivedWeights
from .model.landings import NameTable
from .model.parameters import Target, set_loader, targets_of, widths_of
from .model.plan_document import plan_document
from .native.call import Call
from .native.checks import check_dense, check_named_once
from .native.loader_call import LoaderCalls
from .native.native_path import NativePath
from .native.pairs import PairTable
from .native.recording import Recording
from .native.stream_lane import StreamLane
from .replay.recipe_store import RecipeStore
from .replay.replay_path import ReplayPath
from .report.report import RefitReport


class ModelRefit:
    """Everything the plugin knows about one served model and its updates.

    Side effects on the host: `attach` replaces `model.load_weights` (an instance attribute) and
    each parameter's `weight_loader`.

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
        self.report = RefitReport(self.targets.values(), self.names, self._learn_names)
        self.recipes = RecipeStore()
        self.sender_memory = SenderMemory()
        self.kv = KvScales(options.kv_scales, self.derived.end_of_update)
        self._probe_names = probe_names
        self.calibration: Calibration | None = None  # made where a server calibrates
        self.sent_scales = SentScales(options.kv_scales, self._attention_of)
        self.audit = Audit(
            model,
            options,
            self.names,
            self.pairs,
            self.report,
            self._learn_names,
            self.sent_scales,
        )
        self.journal = Journal(self.report, self.audit, self.derived)
        self._loaders = LoaderCalls(options, self.pairs, self.report, self.names)
        self._native = NativePath(model, self.derived)
        self._replayed = ReplayPath(
            self._loaders, self.report, self.recipes, self.derived, self._native
        )

    def attach(self) -> None:
        for target in self.targets.values():
            self._wrap_loader(target)
        self.model.load_weights = self.load_weights  # type: ignore[assignment]
        for device in self._devices:
            warm_up(
                device,
                widths_of(self.targets.values()),
                pow2_scale=self.options.use_weight_pow2_scale,
                round_to_bf16=self.options.round_to_bf16,
            )

    def _wrap_loader(self, target: Target) -> None:
        from sglang.srt.model_loader.weight_utils import default_weight_loader

        parameter: Any = target.parameter
        native = getattr(parameter, "weight_loader", None) or default_weight_loader

        def weight_loader(_: Any, loaded_weight: torch.Tensor, *args: Any, **kwargs: Any) -> None:
            if self.journal.running is None:
                raise outside_of_a_call(target.name)
            self._loaders.load(self.journal.running, target, native, loaded_weight, args, kwargs)

        set_loader(parameter, weight_loader)

    def during(self, scope: UpdateScope) -> AbstractContextManager[Update]:
        """Every `load_weights` in here belongs to one request of an update."""
        return self.journal.during(scope)

    def wait_for_device(self) -> None:
        """A forward pass that SGLang overlaps with requests reads old codes with old scales to its end."""
        for device in self._devices:
            if device.type not in ("cpu", "meta"):
                torch.get_device_module(device).synchronize(device)

    @property
    def is_updating(self) -> bool:
        """Whether a request of an update is being served."""
        return self.journal.update.scope.is_serving

    def load_weights(self, weights: Any, *args: Any, **kw: Any) -> Any:
        """`model.load_weights`, with every write quantized and every name accounted for.

        Args:
            weights: `(name, tensor)` pairs, or a `FlatBucket`.

        Raises:
            RefitError: something that was sent was not stored. What was stored stays stored, and
                the status section says so.
        """
        with self.kv.unfolded(), self.journal.call() as call:
            arrival = self._classify(weights, may_replay=call.scope.may_replay and not (args or kw))
            self.journal.expect(arrival)
            if self._device is not None and self._device.type != "meta":
                call.lane = StreamLane(self._device)
            result = self._write(call, arrival, *args, **kw)
        if call.recording is not None:
            self.recipes.learn(call.recording, self.report, call, self.options)
        return result

    def _classify(self, weights: Any, *, may_replay: bool) -> Arrival:
        """What arrived; a packed pair is two tensors from here on."""
        bucket = bucket_of(weights)
        if bucket is None:
            return Stream(weights)
        if self._device is not None:
            bucket = on_device(bucket, self._device)
        may_replay = may_replay and self.options.replay
        recipe = self.recipes.find(bucket) if may_replay else None
        if recipe is None and has_packed_pairs(bucket):
            bucket = TensorBucket(split_pairs(bucket, self.plan().tensors))
            recipe = self.recipes.find(bucket) if may_replay else None
        if recipe is not None:
            return KnownBucket(bucket, recipe)
        check_named_once(bucket.names)
        if isinstance(bucket, TensorBucket):
            check_dense(bucket)
        return NewBucket(bucket, is_recorded=may_replay)

    def _write(self, call: Call, arrival: Arrival, *args: Any, **kw: Any) -> Any:
        match arrival:
            case KnownBucket():
                return self._replayed.write(call, arrival)
            case NewBucket(is_recorded=True):
                call.recording = Recording(arrival.bucket)
        return self._native.write(call, arrival, *args, **kw)

    # -- the plan ----------------------------------------------------------------------------------

    def plan(self) -> RefitPlan:
        """The public document, made once. Without a load at startup the checkpoint is probed."""
        return self._plan

    @functools.cached_property
    def _plan(self) -> RefitPlan:
        if not self.names.is_filled:
            self._learn_names()
        document = plan_document(self.model, self.names, self.targets, self.schemes, self.options)
        return RefitPlan.from_dict(document)

    def _attention_of(self, sent_prefix: str) -> str | None:
        """The served attention module whose weights are sent below that prefix."""
        if not self.names.is_filled:
            self._learn_names()
        return self.names.attention_of(sent_prefix)

    def _learn_names(self) -> None:
        """Send every name of the checkpoint through the loaders, on `meta`; nothing is stored."""
        call = Call(PROBE)
        with torch.no_grad(), self.derived.held_back(), self.journal.probing(call):
            self._native.write(call, Stream(self._probe_names()))
        self.audit.note_names(call)
