"""Quantize on write: what happens between a model's `load_weights` and the served bytes.

`attach` puts one wrapper around the model's `load_weights` and one around every parameter's
`weight_loader`. All of SGLang's weight paths (checkpoint, tensors, flattened buckets, distributed,
IPC, disk, custom loaders) go through both.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import nullcontext
from operator import methodcaller
from typing import Any

import numpy as np
import torch

from ..config import Options
from ..errors import RefitError
from ..numerics import warmup
from ..numerics.write_table import BAD_SCALE, NAN_CODE, Kind
from ..scheme import Scheme
from ..wire.pair import PAIR_SUFFIX
from .arrival.bucket import Bucket, TensorBucket, bucket_of
from .arrival.packed_pairs import split_pairs
from .arrival.sent_tensors import weight_name_of
from .model.derived_weights import DerivedWeights
from .model.fused_experts import load_left_experts
from .model.landings import LEARNING, PROBE, NameTable
from .model.mla_parts import load_parts_singly
from .model.parameters import Target, targets_of
from .model.plan_document import plan_document
from .model.unneeded_names import skipped_by_design
from .native.checks import MAX_LISTED, listed, not_finite_errors, unknown_names_error
from .native.loader_call import Call, LoaderCalls
from .native.pairs import PairTable, bad_scale_error, nan_code_error
from .native.recording import Recording
from .replay.recipe import Recipe, recipe_of
from .replay.recipe_store import RecipeStore
from .report.report import Arrived, RefitReport

logger = logging.getLogger(__name__)

_IS_PAIR = methodcaller("endswith", PAIR_SUFFIX)
_REPLAYED_KINDS = ("tensor", "distributed")


class ModelRefit:
    """Everything the plugin knows about one served model and its updates.

    Side effects on the host: `attach` replaces `model.load_weights` (an instance attribute) and
    each parameter's `weight_loader`.
    """

    def __init__(
        self, model: torch.nn.Module, options: Options, schemes: dict[str, Scheme]
    ) -> None:
        self.model = model
        self.options = options
        self.schemes = schemes
        self.targets = targets_of(model)
        self.names = NameTable()
        self.pairs = PairTable()
        self.derived = DerivedWeights(model)
        self.report = RefitReport(self.targets.values())
        self.recipes = RecipeStore()
        self.kind = "startup"
        self.keep_pairs = False
        self.implicit_session = False
        self.skipped_at_startup: set[str] = set()
        # Names of the checkpoint on `meta`, for a model that was not loaded from it.
        self.probe_names: Callable[[], list[tuple[str, torch.Tensor]]] = list
        self._plan: dict[str, Any] | None = None
        self._loaders = LoaderCalls(options, self.pairs, self.report, self.names)
        self._native_load_weights: Any = None
        self._call: Call | None = None

    def attach(self) -> None:
        self._native_load_weights = load_parts_singly(self.model)
        for target in self.targets.values():
            self._wrap_loader(target)
        self.model.load_weights = self.load_weights  # type: ignore[assignment]
        if any(target.parameter.device.type == "cpu" for target in self.targets.values()):
            warmup()

    def _wrap_loader(self, target: Target) -> None:
        from sglang.srt.model_loader.weight_utils import default_weight_loader

        parameter: Any = target.parameter
        native = getattr(parameter, "weight_loader", None) or default_weight_loader

        def weight_loader(_: Any, loaded_weight: torch.Tensor, *args: Any, **kwargs: Any) -> None:
            if self._call is None:
                raise RefitError(
                    target.name,
                    "a weight_loader called outside model.load_weights",
                    "every write has to belong to an update, or its scale could be left behind",
                    "Send the tensor through model.load_weights or an update_weights_from_* call.",
                )
            self._loaders.load(self._call, target, native, loaded_weight, args, kwargs)

        if isinstance(getattr(type(parameter), "weight_loader", None), property):
            parameter._weight_loader = weight_loader
        else:
            parameter.weight_loader = weight_loader

    def load_weights(self, weights: Any, *args: Any, **kw: Any) -> Any:
        """`model.load_weights`, with every write quantized and every name accounted for.

        Args:
            weights: `(name, tensor)` pairs, or a `FlatBucket`.

        Raises:
            RefitError: something that was sent was not stored. What was stored stays stored, and
                the status section says so.
        """
        bucket = bucket_of(weights)
        may_replay = (
            self.options.replay
            and bucket is not None
            and self.kind in _REPLAYED_KINDS
            and not (args or kw)
        )
        plan = self.recipes.find(bucket) if may_replay and bucket is not None else None
        if plan is None and bucket is not None and any(map(_IS_PAIR, bucket.names)):
            weights = split_pairs(bucket, self.plan()["tensors"])
            bucket = TensorBucket(weights)
            plan = self.recipes.find(bucket) if may_replay else None
        call = Call(self.kind, self.keep_pairs)
        if may_replay and plan is None and bucket is not None:
            call.recording = Recording(bucket)
        self._call = call
        if plan is not None:
            numbers = plan.numbers
        else:
            names = bucket.names if bucket is not None else ()
            numbers = self.report.window.numbers_of(names)
        self.report.start_call(numbers)
        try:
            with torch.no_grad():
                if plan is not None and bucket is not None:
                    result = self._replay(call, plan, bucket)
                    if self.derived.is_needed:
                        self.derived.refresh(bucket.names)
                else:
                    sent = bucket if bucket is not None else weights
                    result = self._load_natively(call, sent, *args, **kw)
            skipped = self._finish(call, plan)
        except Exception as error:
            # Not to go on, only to write it down.
            self.derived.refresh(call.touched)
            errors = call.errors or {call.stopped_at: str(error)}
            self.report.end_call(self._arrived(call, plan, bucket, errors), errors)
            raise
        finally:
            call.sources.forget_tensors()
            self._call = None
        self.report.end_call(self._arrived(call, plan, bucket, {}), {})
        if call.recording is not None and bucket is not None:
            self._keep_plan(call, call.recording, skipped)
        return result

    def _load_natively(self, call: Call, weights: Any, *args: Any, **kw: Any) -> Any:
        keeps_places = call.kind not in ("startup", PROBE)
        with self.derived.in_place() if keeps_places else nullcontext():
            result = self._native_load_weights(call.sources.watch(weights), *args, **kw)
            load_left_experts(self.model, call.sources.left(), self._native_load_weights)
        return result

    # -- replay ----------------------------------------------------------------------------------

    def _replay(self, call: Call, plan: Recipe, bucket: Bucket) -> Any:
        """Write a bucket from its plan; what has none goes through the native loaders."""
        table = plan.runner.table
        flags = plan.runner.run(bucket.addresses())
        for piece in table.bad_pieces(flags):
            name = bucket.names[plan.positions[piece]]
            if table.pieces["kind"][piece] == Kind.CODES:
                found = set(table.flags_of(flags, piece).ravel().tolist())
                if NAN_CODE in found:
                    call.errors[name] = str(nan_code_error(name))
                if BAD_SCALE in found:
                    scale_name = bucket.names[plan.positions[piece - 1]]
                    text = str(bad_scale_error(scale_name))
                    call.errors |= {name: text, scale_name: text}
                continue
            bad = torch.from_numpy(table.flags_of(flags, piece).astype(bool))
            call.not_finite.append((name, bad))
        for recorded in plan.singly:
            write = recorded.write.repeat(bucket.tensor(recorded.position))
            name = bucket.names[recorded.position]
            self._loaders.apply(call, recorded.target, name, write)
        self.report.written_again(plan.targets, plan.regions)
        sampled = set()
        for source, piece in plan.samples:
            granularity = source.target.granularity
            if granularity not in sampled and self.report.wants_sample(granularity):
                sampled.add(granularity)
                view = source.write.repeat(bucket.tensor(source.position)).source
                assert view is not None
                self.report.sample(granularity, view, *piece)
        counts = self.recipes.counts
        counts.calls += 1
        counts.tensors += plan.size - len(plan.native)
        if not plan.native:
            return None
        self._count_native(plan.native)
        rest = [(bucket.names[at], bucket.tensor(at)) for at in sorted(plan.native)]
        return self._load_natively(call, rest)

    def _count_native(self, native: dict[int, str]) -> None:
        counts = self.recipes.counts
        counts.native_tensors += len(native)
        counts.native_reasons.update(native.values())

    def _keep_plan(self, call: Call, recording: Recording, skipped: list[str]) -> None:
        """After a call that succeeded: make its plan, or count why there is none."""
        bucket = recording.bucket
        for position, name in enumerate(bucket.names):
            if name not in call.touched and name not in skipped:
                recording.refuse(position, "no loader was called for it by name")
        plan = recipe_of(recording, self.report, call.touched, self.options)
        counts = self.recipes.counts
        counts.native_calls += 1
        if plan is not None:
            self.recipes.add(bucket, plan)
        else:
            counts.native_reasons["a bucket that can't be replayed"] += 1

    def _arrived(
        self, call: Call, plan: Recipe | None, bucket: Bucket | None, errors: dict[str, str]
    ) -> Arrived:
        """What came in this call, for the report."""
        window = self.report.window
        stored = window.numbers_of(name for name in call.touched if name not in errors)
        if plan is None or bucket is None:
            names = bucket.names if bucket is not None else call.sources.names
            numbers = window.numbers_of(names)
            return Arrived(numbers, stored, call.sources.nbytes, call.touched)
        if errors:
            kept = [name for name in plan.touched if name not in errors]
            stored = np.concatenate([stored, window.numbers_of(kept)])
        else:
            stored = np.concatenate([stored, plan.stored])
        touched = plan.touched if not call.touched else {**plan.touched, **call.touched}
        return Arrived(plan.numbers, stored, plan.nbytes, touched, is_replayed=True)

    # -- the plan of the model ---------------------------------------------------------------------

    def plan(self) -> dict[str, Any]:
        """The document of `plan_document`, made once. Without a load at startup it is probed."""
        if self._plan is None:
            if not self.names.is_filled:
                self._probe()
            self._plan = plan_document(
                self.model, self.names, self.targets, self.schemes, self.options
            )
        return self._plan

    def _probe(self) -> None:
        """Send every name of the checkpoint through the loaders, on `meta`; nothing is stored."""
        weights = self.probe_names()
        call = Call(PROBE, keep_pairs=False)
        self._call = call
        # Some models derive weights from others as their last step; nothing was loaded here.
        derives = hasattr(self.model, "post_load_weights")
        if derives:
            self.model.post_load_weights = lambda *_, **__: None  # type: ignore[assignment]
        try:
            with torch.no_grad():
                self._load_natively(call, weights)
        finally:
            self._call = None
            if derives:
                del self.model.post_load_weights
        self.names.not_taken(self._unknown(call))

    # -- the end of a call -----------------------------------------------------------------------

    def _finish(self, call: Call, plan: Recipe | None) -> list[str]:
        """Raise what went wrong; returns names that no parameter takes, and that may pass."""
        call.errors.update(not_finite_errors(call.not_finite))
        errors = call.errors
        unknown = self._unknown(call)
        if call.kind in ("startup", "disk"):
            # A checkpoint may hold more than the model takes (SGLang loads it all the same);
            # what it skipped once it may skip again.
            self.skipped_at_startup.update(unknown)
            if call.kind in LEARNING:
                self.names.not_taken(unknown)
        elif unknown and self.options.unknown_names == "warn":
            logger.warning("fp8rl: no parameter takes %s", listed(unknown))
        elif unknown:
            text = str(unknown_names_error(unknown, self.report.known_names))
            errors.update(dict.fromkeys(unknown, text))
        if call.keep_pairs:
            self.pairs.detach()
        else:
            errors.update(self.close_pairs())
        count = plan.size if plan is not None else len(call.sources.names)
        if not count:
            errors[""] = (
                "an update with an empty list of tensors; an update names at least one. "
                "Check what the trainer's iterator yields"
            )
        if errors:
            texts = list(dict.fromkeys(errors.values()))
            raise RefitError(
                f"an update of {count} tensor(s)",
                " | ".join(texts[:MAX_LISTED]),
                f"{len(errors)} of them had problems, everything else in this call was stored",
                "Mend what is named and send it again.",
            )
        return [name for name in call.sources.unused() if name not in unknown]

    def _unknown(self, call: Call) -> list[str]:
        """Names that went by and reached no parameter, without a reason. A scale has its weight's."""
        return [
            name
            for name in call.sources.unused()
            if weight_name_of(name) not in self.skipped_at_startup
            and not skipped_by_design(name, self.model)
        ]

    def close_pairs(self) -> dict[str, str]:
        """Give up FP8 halves that are still waiting; returns their names and what is missing."""
        halves = self.pairs.open_halves()
        self.pairs.drop()
        return {
            name: f"{text}; both halves of an FP8 weight belong into one call (or one session), "
            "and the half that came was not stored. Send them together"
            for name, text in halves.items()
        }
