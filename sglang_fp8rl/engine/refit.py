"""Quantize on write: what happens between a model's `load_weights` and the served bytes.

`attach` puts one wrapper around the model's `load_weights` and one around every parameter's
`weight_loader`. All of SGLang's weight paths (checkpoint, tensors, flattened buckets, distributed,
IPC, disk, custom loaders) go through both.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from time import perf_counter
from typing import Any

import torch

from ..config import Options
from ..errors import Fp8RlError, HostError
from ..scheme import Scheme
from ..wire.stages import ANSWERING, LOADING
from .arrival.bucket import Bucket, apart, bucket_of, check_bucket
from .arrival.sent_tensors import SourceIndex
from .arrival.update import Origin, Update
from .extension import Way, extensions
from .interception import Write, stream_lane
from .ledger.ledger import NOTHING, Arrived, Ledger
from .model.derived_weights import DerivedWeights
from .model.landings import NameTable
from .model.parameters import (
    ModelMemory,
    Target,
    loader_of,
    made_anew_error,
    set_loader,
    targets_of,
)
from .model.sent_otherwise import (
    load_left_experts,
    load_parts_singly,
    refuse_loaders_that_ask,
)
from .native import deferred
from .native.call import Call
from .native.calls import Calls
from .native.checks import of_known_sizes, why_not_finite
from .native.loader_call import LoaderCalls
from .native.observer import Observer
from .native.pairs import PairTable
from .native.recording import Recording
from .native.tied import note_draft_write, noted


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
        self.runner: Any = None  # SGLang's, which counts forward passes
        self.derived = DerivedWeights(model, self._has_run, self._settle)
        self.ledger = Ledger(self.targets.values(), self.names)
        self._probe_names = probe_names
        self.extensions = [kind(self) for kind in extensions()]
        self.calls = Calls(model, options, self.pairs, self.ledger, self.derived, self.extensions)
        self.during = self.calls.during
        self._loaders = LoaderCalls(options, self.pairs, self.ledger)
        self._load_weights = load_parts_singly(model)  # before its loaders are wrapped

    def attach(self) -> None:
        refuse_loaders_that_ask(self.model)
        for target in self.targets.values():
            self._wrap_loader(target)
        self.derived.attach()
        self.model.load_weights = self.load_weights  # type: ignore[assignment]
        self.model.fp8rl_refit = self  # type: ignore[assignment]

    def _wrap_loader(self, target: Target) -> None:
        parameter, native = target.parameter, loader_of(target.parameter)

        def weight_loader(_: Any, loaded_weight: torch.Tensor, *args: Any, **kwargs: Any) -> None:
            call, update = self.calls.running, self.calls.update
            given = target, native, loaded_weight, args, kwargs
            if call is None and update.origin.is_serving:
                stamp = self.ledger.stamp + (not update.calls)
                note_draft_write(self.ledger, *given, stamp)
            else:
                self._loaders.load(call, *given)

        set_loader(parameter, weight_loader)

    def wait_for_device(self) -> None:
        """A forward pass that SGLang overlaps with requests reads old codes with old scales to its end."""
        for device in self._devices:
            wait_for(device)

    def note_loaded(self) -> None:
        """SGLang has loaded and processed the model; nothing has run on it yet."""
        try:
            self.learned_names()
        except Fp8RlError as error:  # each refit says that it can't be judged
            self.names.unknown_because = str(error)
        self.derived.note_loaded(self.written_targets())

    def written_targets(self) -> list[Target]:
        """Those that updates write; every one, where nothing was loaded."""
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
        update, result = self.calls.update, None
        comes_again = update.origin.may_replay and not (args or kw)
        self._settle()  # a call within another
        with self.unfolded(), ExitStack() as behind:
            # What is queued at its end (halves that are kept) reads memory that the sender fills again.
            behind.callback(self.wait_for_device)
            update.marks.append((LOADING, perf_counter()))
            with self.calls.arriving():
                bucket = bucket_of(weights)  # None for a stream
                if bucket is not None and self._device is not None:
                    bucket = bucket.on_device(self._device)
                way = self._way_of(bucket) if bucket is not None and comes_again else None
                if way is not None:
                    call = Call(update, SourceIndex(), bucket, way.brings)
                else:
                    if bucket is not None:
                        check_bucket(bucket)
                        weights = apart(bucket)
                    call = self._watched(update, bucket, weights if comes_again else None)
                self.calls.begin(call)
            with self.calls.open(call):
                if update.origin.is_serving:
                    self.derived.kept_copies.check()
                try:
                    if way is not None:
                        way.write(call)
                        self.derived.refresh(self.ledger.written(), are_served=True)
                    else:
                        result = self._load_natively(call, weights, *args, **kw)
                        del weights  # or it would be kept
                finally:
                    self.derived.norms.derive(self._is_written)
        for extension in self.extensions:
            extension.stored(call)
        update.marks.append((ANSWERING, perf_counter()))
        return result

    def _is_written(self, parameter: torch.nn.Parameter) -> bool:
        """Whether this call wrote it, or a part of it."""
        reached_at = self.ledger.coverage.reached_at
        return reached_at[self.targets[id(parameter)].index] == self.ledger.stamp

    def _has_run(self) -> bool:
        return self.runner is None or self.runner.forward_pass_id > 0

    def _way_of(self, bucket: Bucket) -> Way | None:
        """How it is written without loaders."""
        ways = (extension.way_of(bucket) for extension in self.extensions)
        return next((way for way in ways if way is not None), None)

    def _watched(self, update: Update, bucket: Bucket | None = None, sent: Any = None) -> Call:
        """A call whose tensors go through SGLang's loaders.

        Args:
            sent: the pairs of a bucket of which another may have the same layout.
        """
        sources = SourceIndex(keeps_tensors=not update.origin.is_alone)
        brings = NOTHING if bucket is None else Arrived(len(bucket.names), bucket.nbytes)
        device = self._device
        lane: Any = nullcontext
        if device is not None and device.type != "meta":
            lane = stream_lane(device)
        recording = None
        if bucket is not None and sent is not None and self.options.replay:
            recording = Recording(bucket, sent, sources)
        raised: dict[tuple, tuple[str, str]] = {}
        memory = functools.cache(lambda: ModelMemory(self.model, self.targets.values()))
        observer = Observer(
            sources, memory, self._store, self._settle, raised, stores=update.origin.stores
        )
        call = Call(update, sources, bucket, brings, observer, recording, lane=lane, raised=raised)
        is_large = update.origin.is_serving and brings.tensors >= deferred.FEWEST
        if is_large and bucket is not None and device is not None:
            how = self.ledger, self.options, device, bucket, lane, call.not_finite, raised
            call.deferred = deferred.DeferredWrites(*how, recording)
        return call

    def _settle(self, tensor: torch.Tensor | None = None) -> None:
        """Do the writes that wait; if a `tensor` is given, only where they go to its memory."""
        waiting = None if self.calls.running is None else self.calls.running.deferred
        if waiting is not None and (tensor is None or waiting.waits_for(tensor)):
            waiting.close()

    def _store(self, target: Target, write: Write) -> None:
        """A write that SGLang makes without a loader, in the call that runs."""
        assert self.calls.running is not None
        self._loaders.store(self.calls.running, target, write)

    def _load_natively(self, call: Call, weights: Any, *args: Any, **kw: Any) -> Any:
        """SGLang's own `load_weights`, and whatever it does watched; returns what that returns."""
        assert call.observer is not None
        with (
            self.derived.in_place(from_now_on=call.update.origin.is_serving) as moved,
            call.observer.watching(),
        ):
            if call.update.origin.is_serving:
                weights = of_known_sizes(weights, self.names.known)
                if tied := self.calls.untaken.tied:
                    weights = noted(weights, call, self.ledger, tied)
            weights = call.sources.watch(weights)
            waits: Any = nullcontext(weights)
            if call.deferred is not None:
                waits = call.deferred.until_end_of(weights)
            with waits as weights:
                result = self._load_weights(weights, *args, **kw)
            load_left_experts(self.model, call.sources.left(), self._load_weights)
        quantized = {one.name for one in self.targets.values() if one.is_fp8} if moved else ()
        for place, made_anew in moved:
            if place in quantized:
                raise made_anew_error(place)
            sources = call.sources.made_of(made_anew).sources
            if why := why_not_finite(place, made_anew, sources):
                call.errors[place] = why
            call.sources.leave_native(sources, f"SGLang makes {place} anew while loading")
            call.sources.consume(sources)
        if call.update.origin.is_serving:
            self.derived.refresh(call.sources.consumed, natively=True)
        else:
            self.names.made_into(call.sources.native, call.sources.consumed)
        return result

    def learned_names(self) -> NameTable:
        """The checkpoint's names. Where nothing was loaded they go through the loaders on `meta`; nothing is stored.

        Raises:
            HostError: the loaders of this model need values.
        """
        if not self.names.known:
            self._probe()
        return self.names

    def _probe(self) -> None:
        call = self._watched(Update(Origin.PROBE))
        try:
            with torch.no_grad(), self.derived.held_back(), self.calls.probing(call):
                self._load_natively(call, self._probe_names())
            self.calls.untaken.note(call)
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


def wait_for(device: torch.device) -> None:
    """Until everything is done that was asked of the device."""
    if device.type not in ("cpu", "meta"):
        torch.get_device_module(device).synchronize(device)


def refit_of(model: Any) -> ModelRefit | None:
    """The bookkeeping of a model served with `fp8_blockwise_online`, else None."""
    return getattr(model, "fp8rl_refit", None)
