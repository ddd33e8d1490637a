"""Quantize on write: what happens between a model's `load_weights` and the served bytes.

`attach` puts one wrapper around the model's `load_weights` and one around every parameter's
`weight_loader`. All of SGLang's weight paths (checkpoint, tensors, flattened buckets, distributed,
IPC, disk, custom loaders) go through both.
"""

from __future__ import annotations

import difflib
import logging
import threading
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch

from ..config import Options
from ..errors import Fp8RlError, RefitError
from ..numerics.cast import cast_blockwise_into, cast_per_channel_into
from ..scheme import Granularity, Scheme
from .pairs import PairTable, store_pair
from .report import RefitReport
from .skipped import skipped_by_design
from .sources import SourceIndex
from .targets import Target, full_shape_of, targets_of
from .writes import Write, make_stand_in, writes_of

logger = logging.getLogger(__name__)

_FLOAT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_FP8 = torch.float8_e4m3fn
_MAX_LISTED = 8


@dataclass
class Call:
    """One pass through `model.load_weights`.

    Attributes:
        kind: `startup`, `disk`, `tensor`, `distributed` or `ipc`.
        keep_pairs: whether an FP8 half may wait for the next call.
        errors: names, and what went wrong with them without stopping the call.
        not_finite: per write, the name and a bool tensor of blocks that kept their old bytes.
    """

    kind: str
    keep_pairs: bool
    sources: SourceIndex = field(default_factory=SourceIndex)
    errors: dict[str, str] = field(default_factory=dict)
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
        self._native_load_weights = self.model.load_weights  # type: ignore[operator]
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

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]], *args: Any, **kw: Any) -> Any:
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
            # Not to go on, only to write it down: a loader that stopped half-way leaves the
            # tensors behind it old.
            stopped = {name: str(error) for name in sent if name not in call.sources.consumed}
            self.report.end_call(call.sources, {**stopped, **call.errors} or {"": str(error)})
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
        try:
            self._store(call, target, native, name, loaded, args, kwargs)
        except Fp8RlError:
            raise
        except (AssertionError, RuntimeError, ValueError, TypeError, IndexError) as error:
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
        loaded: torch.Tensor,
        args: tuple,
        kwargs: dict,
    ) -> None:
        key = (*args, *sorted(kwargs.items()))
        if target.is_scale:
            assert target.weight is not None
            pair = self.pairs.add_scale(target.weight, key, name, loaded)
            self._store_pair(pair)
            return
        is_fp8_source = loaded.dtype == _FP8
        if not (is_fp8_source and target.is_fp8) and loaded.dtype not in _FLOAT_DTYPES:
            self._check_other_dtype(target, name, loaded)
        self._check_shape(target, name, loaded, args)
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
        dtype = loaded.dtype
        with self._lock:
            if dtype not in target.stand_ins:
                target.stand_ins[dtype] = make_stand_in(target.parameter, dtype)
            stand_in = target.stand_ins[dtype]
        return writes_of(native, stand_in, loaded, args, kwargs)

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
            finite = torch.isfinite(source).all() if source.is_floating_point() else None
            if finite is not None and not bool(finite):
                call.not_finite.append((name, ~finite.reshape(1)))
                return
            destination.copy_(source)
        else:
            self._quantize(call, target, name, write, source)
        self.report.written(target, write.region)

    def _quantize(
        self, call: Call, target: Target, name: str, write: Write, source: torch.Tensor
    ) -> None:
        """Cast one write straight into its region, and its scales into theirs."""
        assert target.scale is not None
        region, (rows, columns) = write.region, target.parameter.shape[-2:]
        if region is None or region.shape[-2:] != tuple(source.shape):
            raise RefitError(
                name,
                f"a write of shape {write.shape}, strides {write.stride} into {target.name}",
                "a quantized write covers whole rows and columns of one matrix",
                "Send the tensor as the checkpoint has it.",
            )
        (row, column), (height, width) = region.start[-2:], region.shape[-2:]
        codes, scales = write.destination(target.parameter), target.scale.data
        source = source.to(codes.device)
        if target.granularity is Granularity.PER_CHANNEL:
            if width != columns:
                raise _cuts_block(name, target, f"columns {column}:{column + width} of {columns}")
            scales = scales[row : row + height]
            bad = cast_per_channel_into(source, codes, scales, name=name)
        else:
            block_n, block_k = self.options.weight_block_size
            whole = (
                row % block_n == 0
                and column % block_k == 0
                and (height % block_n == 0 or row + height == rows)
                and (width % block_k == 0 or column + width == columns)
            )
            if not whole:
                raise _cuts_block(name, target, str(region))
            first_row, first_column = row // block_n, column // block_k
            scales = scales[
                first_row : first_row + -(-height // block_n),
                first_column : first_column + -(-width // block_k),
            ]
            bad = cast_blockwise_into(
                source, codes, scales, block_size=self.options.weight_block_size, name=name
            )
        call.not_finite.append((name, bad))
        self.report.sample(target.granularity, source, codes, scales)

    # -- checks ----------------------------------------------------------------------------------

    @staticmethod
    def _check_other_dtype(target: Target, name: str, loaded: torch.Tensor) -> None:
        if loaded.dtype == target.parameter.dtype:
            return
        raise RefitError(
            name,
            f"dtype {loaded.dtype} for {target.name} ({target.parameter.dtype})",
            "weights come in FP32, BF16 or FP16, or in float8_e4m3fn where the module is FP8",
            "Convert it on the trainer; `sglang-fp8rl plan` says which modules take FP8.",
        )

    @staticmethod
    def _check_shape(target: Target, name: str, loaded: torch.Tensor, args: tuple) -> None:
        expected = full_shape_of(target, args)
        if expected is not None and tuple(loaded.shape) != expected:
            raise RefitError(
                name,
                f"shape {tuple(loaded.shape)}",
                f"{target.name} takes the full, unsharded {expected}",
                "Send the tensor as the checkpoint has it; the engine cuts this rank's shard.",
            )

    def _finish(self, call: Call) -> None:
        call.errors.update(_not_finite_errors(call.not_finite))
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
            logger.warning("fp8rl: no parameter takes %s", _listed(unknown))
        elif unknown:
            text = str(self._unknown_name_error(unknown))
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
                " | ".join(texts[:_MAX_LISTED]),
                f"{len(errors)} of them had problems, everything else in this call was stored",
                "Mend what is named and send it again.",
            )
        self.report.end_call(call.sources, {})

    def close_pairs(self) -> dict[str, str]:
        """Give up FP8 halves that are still waiting; returns their names and what is missing."""
        halves = self.pairs.open_halves()
        self.pairs.drop()
        return {
            name: f"{text}; both halves of an FP8 weight belong into one call (or one session), "
            "and the half that came was not stored. Send them together"
            for name, text in halves.items()
        }

    def _unknown_name_error(self, unknown: list[str]) -> RefitError:
        known = list(self.report.known_names) or [t.name for t in self.targets.values()]
        near = difflib.get_close_matches(unknown[0], known, n=3, cutoff=0.6)
        return RefitError(
            _listed(unknown),
            f"{len(unknown)} name(s) that no parameter takes",
            "every tensor sent has to land somewhere",
            (f"Near matches: {', '.join(near)}. " if near else "")
            + "Set unknown_names='warn' in quantization_config to let them pass.",
        )


def _cuts_block(name: str, target: Target, where: str) -> RefitError:
    return RefitError(
        name,
        f"a write to {where} of {target.name}",
        f"it starts or ends inside a {target.granularity.value} scale's block",
        "Add the module to ignored_layers, or use another tensor-parallel size.",
    )


def _not_finite_errors(found: list[tuple[str, torch.Tensor]]) -> dict[str, str]:
    """One line per tensor with a NaN or Inf. Synchronizes with the device once."""
    if not found:
        return {}
    any_bad = torch.stack([bad.any() for _, bad in found]).cpu().tolist()
    lines = {}
    for (name, bad), is_bad in zip(found, any_bad, strict=True):
        if is_bad:
            count = int(bad.sum())
            first = bad.nonzero()[0].tolist()
            lines[name] = (
                f"{name}: NaN or Inf in {count} of {bad.numel()} block(s), first at {first}; "
                "a block that is not finite keeps its old bytes. Mend the weight and send it again"
            )
    return lines


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - _MAX_LISTED} more" if len(names) > _MAX_LISTED else ""
    return ", ".join(names[:_MAX_LISTED]) + more
