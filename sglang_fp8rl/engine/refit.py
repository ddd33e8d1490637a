"""Quantize on write: what happens between a model's `load_weights` and the served bytes.

`attach` puts one wrapper around the model's `load_weights` and one around every parameter's
`weight_loader`. All of SGLang's weight paths (checkpoint, tensors, flattened buckets, distributed,
IPC, disk, custom loaders) go through both.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch

from ..config import Options
from ..errors import Fp8RlError, RefitError
from ..scheme import Scheme
from .checks import (
    MAX_LISTED,
    check_dtype,
    check_shape,
    check_takes_scale,
    listed,
    not_finite_errors,
    unknown_names_error,
)
from .pairs import PairTable, store_pair
from .quantize import quantize_write
from .report import RefitReport
from .skipped import skipped_by_design
from .sources import SourceIndex
from .targets import Target, targets_of
from .writes import Write, make_stand_in, writes_of

logger = logging.getLogger(__name__)

_FLOAT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_FP8 = torch.float8_e4m3fn


@dataclass
class Call:
    """One pass through `model.load_weights`.

    Attributes:
        kind: `startup`, `disk`, `tensor`, `distributed` or `ipc`.
        keep_pairs: whether an FP8 half may wait for the next call.
        errors: names, and what went wrong with them without stopping the call.
        touched: names, and which part of the model each was for.
        stopped_at: the name whose loader raised.
        not_finite: per write, the name and a bool tensor of blocks that kept their old bytes.
    """

    kind: str
    keep_pairs: bool
    sources: SourceIndex = field(default_factory=SourceIndex)
    errors: dict[str, str] = field(default_factory=dict)
    touched: dict[str, tuple] = field(default_factory=dict)
    stopped_at: str = ""
    not_finite: list[tuple[str, torch.Tensor]] = field(default_factory=list)


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
        self.pairs = PairTable()
        self.report = RefitReport(self.targets.values())
        self.kind = "startup"
        self.keep_pairs = False
        self.implicit_session = False
        self.skipped_at_startup: set[str] = set()
        self._native_load_weights: Any = None
        self._call: Call | None = None
        self._lock = threading.Lock()

    def attach(self) -> None:
        for target in self.targets.values():
            self._wrap_loader(target)
        self._native_load_weights = self.model.load_weights
        self.model.load_weights = self.load_weights  # type: ignore[assignment]

    def _wrap_loader(self, target: Target) -> None:
        from sglang.srt.model_loader.weight_utils import default_weight_loader

        parameter: Any = target.parameter
        native = getattr(parameter, "weight_loader", None) or default_weight_loader

        def weight_loader(_: Any, loaded_weight: torch.Tensor, *args: Any, **kwargs: Any) -> None:
            self._load_one(target, native, loaded_weight, args, kwargs)

        if isinstance(getattr(type(parameter), "weight_loader", None), property):
            parameter._weight_loader = weight_loader
        else:
            parameter.weight_loader = weight_loader

    def load_weights(
        self, weights: Iterable[tuple[str, torch.Tensor]], *args: Any, **kw: Any
    ) -> Any:
        """`model.load_weights`, with every write quantized and every name accounted for.

        Raises:
            RefitError: something that was sent was not stored. What was stored stays stored, and
                the status section says so.
        """
        call = Call(self.kind, self.keep_pairs)
        self._call = call
        sent = [name for name, _ in weights] if isinstance(weights, list) else []
        self.report.start_call(sent)
        try:
            with torch.no_grad():
                result = self._native_load_weights(call.sources.watch(weights), *args, **kw)
            self._finish(call)
        except Exception as error:
            # Not to go on, only to write it down.
            culprit = call.stopped_at or ""
            self.report.end_call(call.sources, call.errors or {culprit: str(error)}, call.touched)
            raise
        finally:
            call.sources.forget_tensors()
            self._call = None
        return result

    # -- one loader call -------------------------------------------------------------------------

    def _load_one(
        self, target: Target, native: Any, loaded: torch.Tensor, args: tuple, kwargs: dict
    ) -> None:
        call = self._call
        if call is None:
            raise RefitError(
                target.name,
                "a weight_loader called outside model.load_weights",
                "every write has to belong to an update, or its scale could be left behind",
                "Send the tensor through model.load_weights or an update_weights_from_* call.",
            )
        source = call.sources.find(loaded)
        name = source.name if source else target.name
        key = _part_of(args, kwargs)
        call.touched[name] = (target.name, key)
        try:
            is_scale = source is not None and source.is_scale
            self._store(call, target, native, name, is_scale, loaded, args, kwargs)
        except Fp8RlError:
            call.stopped_at = name
            raise
        except (AssertionError, RuntimeError, ValueError, TypeError, IndexError) as error:
            call.stopped_at = name
            raise RefitError(
                name,
                f"{loaded.dtype} of shape {tuple(loaded.shape)} for {target.name} "
                f"{tuple(target.parameter.shape)}",
                f"SGLang's weight_loader refused it: {error or type(error).__name__}",
                "Send the tensor as the checkpoint has it.",
            ) from error

    def _store(
        self,
        call: Call,
        target: Target,
        native: Any,
        name: str,
        is_scale: bool,
        loaded: torch.Tensor,
        args: tuple,
        kwargs: dict,
    ) -> None:
        key = _part_of(args, kwargs)
        if is_scale:
            check_takes_scale(target, name)
            self._store_pair(self.pairs.add_scale(target, key, name, loaded))
            return
        is_fp8_source = loaded.dtype == _FP8
        if not (is_fp8_source and target.is_fp8) and loaded.dtype not in _FLOAT_DTYPES:
            check_dtype(target, name, loaded)
        check_shape(target, name, loaded, args, kwargs)
        writes = self._writes(target, native, loaded, args, kwargs)
        if is_fp8_source and target.is_fp8:
            pair = self.pairs.add_weight(target, key, name, loaded, writes)
            self._store_pair(pair)
            return
        if not writes and not target.is_fp8:
            # This rank holds nothing of it, or the loader does more than copy: let it.
            native(target.parameter, loaded, *args, **kwargs)
        for write in writes:
            self._apply(call, target, name, write)

    def _writes(
        self, target: Target, native: Any, loaded: torch.Tensor, args: tuple, kwargs: dict
    ) -> list[Write]:
        """What the loader writes: repeated if it wrote for the same arguments and layout before.

        A loader depends on nothing else, but for an expert's: where experts live may change while
        serving, so it always runs.
        """
        layout = (loaded.dtype, tuple(loaded.shape), loaded.stride())
        key = (*layout, args, tuple(sorted(kwargs.items())))
        recorded = target.recorded.get(key)
        if recorded is not None:
            return [one.repeat(loaded) for one in recorded]
        with self._lock:
            if loaded.dtype not in target.stand_ins:
                target.stand_ins[loaded.dtype] = make_stand_in(target.parameter, loaded.dtype)
            stand_in = target.stand_ins[loaded.dtype]
        writes = writes_of(native, stand_in, loaded, args, kwargs)
        if target.is_repeatable and writes:
            taken = [write.taken_from(loaded) for write in writes]
            if all(one is not None for one in taken):
                target.recorded[key] = [one for one in taken if one is not None]
        return writes

    def _store_pair(self, pair: Any) -> None:
        if pair is None:
            return
        store_pair(pair, self.options.weight_block_size)
        for write in pair.writes:
            self.report.written(pair.target, write.region)

    def _apply(self, call: Call, target: Target, name: str, write: Write) -> None:
        if write.source is None:
            write.destination(target.parameter).fill_(write.fill)
            return
        source = write.source
        if not target.is_fp8:
            destination = write.destination(target.parameter)
            if source.is_floating_point():
                # Without a temporary of the tensor's size: NaN spreads, Inf is an extreme.
                finite = torch.isfinite(torch.stack(source.aminmax())).all()
                if not bool(finite):
                    call.not_finite.append((name, ~finite.reshape(1)))
                    return
            destination.copy_(source)
        else:
            for *arguments, bad in quantize_write(target, name, write, self.options):
                call.not_finite.append((name, bad))
                self.report.sample(target.granularity, *arguments)
        self.report.written(target, write.region)

    # -- the end of a call -----------------------------------------------------------------------

    def _finish(self, call: Call) -> None:
        call.errors.update(not_finite_errors(call.not_finite))
        errors = call.errors
        unknown = [
            name
            for name in call.sources.unused()
            if name not in self.skipped_at_startup and not skipped_by_design(name, self.model)
        ]
        if call.kind in ("startup", "disk"):
            # A checkpoint may hold more than the model takes (SGLang loads it all the same);
            # what it skipped once it may skip again.
            self.skipped_at_startup.update(unknown)
        elif unknown and self.options.unknown_names == "warn":
            logger.warning("fp8rl: no parameter takes %s", listed(unknown))
        elif unknown:
            text = str(unknown_names_error(unknown, self.report.known_names))
            errors.update(dict.fromkeys(unknown, text))
        if call.keep_pairs:
            self.pairs.detach()
        else:
            errors.update(self.close_pairs())
        if not call.sources.names:
            errors[""] = (
                "an update with an empty list of tensors; an update names at least one. "
                "Check what the trainer's iterator yields"
            )
        if errors:
            texts = list(dict.fromkeys(errors.values()))
            raise RefitError(
                f"an update of {len(call.sources.names)} tensor(s)",
                " | ".join(texts[:MAX_LISTED]),
                f"{len(errors)} of them had problems, everything else in this call was stored",
                "Mend what is named and send it again.",
            )
        self.report.end_call(call.sources, {}, call.touched)

    def close_pairs(self) -> dict[str, str]:
        """Give up FP8 halves that are still waiting; returns their names and what is missing."""
        halves = self.pairs.open_halves()
        self.pairs.drop()
        return {
            name: f"{text}; both halves of an FP8 weight belong into one call (or one session), "
            "and the half that came was not stored. Send them together"
            for name, text in halves.items()
        }


def _part_of(args: tuple, kwargs: dict) -> tuple:
    """Which part of a parameter a loader call is for; the same for a weight and its scale.

    A fused layer is passed a shard id, an expert its weight's name, shard id and number.
    """
    given = (*args, *(value for _, value in sorted(kwargs.items())))
    return tuple(
        value.removesuffix("_inv").removesuffix("_scale") if isinstance(value, str) else value
        for value in given
    )
