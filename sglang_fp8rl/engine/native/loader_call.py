"""What happens in one call of a `weight_loader`: its writes, checked, quantized and stored."""

from __future__ import annotations

import threading
from contextlib import nullcontext
from typing import Any

import torch

from ...config import Options
from ...errors import Fp8RlError, RefitError
from ...numerics.finite_copy import copy_finite_into
from ..arrival.sent_tensors import Source
from ..interception.writes import RecordedWrite, Write, make_stand_in, writes_of
from ..model.landings import NameTable
from ..model.parameters import Target
from ..report.report import RefitReport
from .call import Call
from .cast_write import quantize_write
from .checks import check_dtype, check_shape, check_takes_scale
from .pairs import HalfPair, PairTable, store_pair

_FLOAT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_FP8 = torch.float8_e4m3fn


class LoaderCalls:
    """Stores what one loader call was given. Loaders may call it from several threads.

    Args:
        options: of the model.
        pairs: FP8 halves that wait for their other half.
        report: told of every region that was written.
        names: told where each name lands, while the model is loaded for the first time.
    """

    def __init__(
        self, options: Options, pairs: PairTable, report: RefitReport, names: NameTable
    ) -> None:
        self.options, self.pairs, self.report, self.names = options, pairs, report, names
        self._lock = threading.Lock()

    def load(
        self,
        call: Call,
        target: Target,
        native: Any,
        loaded: torch.Tensor,
        args: tuple,
        kwargs: dict,
    ) -> None:
        """One loader call: `native(parameter, loaded, *args, **kwargs)`, quantized on write.

        Raises:
            Fp8RlError: the tensor does not fit; nothing of it was stored.
        """
        source = call.sources.find(loaded)
        name = source.name if source else target.name
        call.touched[name] = (target.name, part_of(args, kwargs))
        try:
            with call.lane.entered() if call.lane is not None else nullcontext():
                self._store(call, target, native, source, name, loaded, args, kwargs)
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
        source: Source | None,
        name: str,
        loaded: torch.Tensor,
        args: tuple,
        kwargs: dict,
    ) -> None:
        key = part_of(args, kwargs)
        position = source.position if source else None
        if source is not None and source.is_scale:
            check_takes_scale(target, name)
            _wait(call, position)
            half = self.pairs.add_scale(target, (call.scope.sender, key), name, loaded, source)
            self._store_pair(call, half)
            return
        is_fp8_source = loaded.dtype == _FP8
        if not (is_fp8_source and target.is_fp8) and loaded.dtype not in _FLOAT_DTYPES:
            check_dtype(target, name, loaded)
        check_shape(target, name, loaded, args, kwargs)
        writes, recorded = self._writes(target, native, loaded, args, kwargs)
        if call.scope.learns_names:
            self.names.landed(source, target, key, loaded, writes)
        if not call.scope.stores:
            return
        if is_fp8_source and target.is_fp8:
            _wait(call, position)
            half_key = (call.scope.sender, key)
            pair = self.pairs.add_weight(target, half_key, name, loaded, writes, source)
            self._store_pair(call, pair)
            return
        if not writes and not target.is_fp8:
            # This rank holds nothing of it, or the loader does more than copy: let it.
            _refuse(call, position, "its loader does not copy")
            self.report.written(target, None)
            native(target.parameter, loaded, *args, **kwargs)
        elif call.recording is not None:
            if source is None or source.tensor is None:
                call.recording.refuse(None, "a tensor that was not sent")
            else:
                known = recorded if loaded is source.tensor else None
                call.recording.add(source.position, source.tensor, target, writes, known)
        for write in writes:
            self.apply(call, target, name, write)

    def _writes(
        self, target: Target, native: Any, loaded: torch.Tensor, args: tuple, kwargs: dict
    ) -> tuple[list[Write], list[RecordedWrite] | None]:
        """What the loader writes: repeated if it wrote for the same arguments and layout before.

        A loader depends on nothing else, unless experts may move. Also returns what was recorded,
        relative to `loaded`.
        """
        layout = (loaded.dtype, tuple(loaded.shape), loaded.stride())
        key = (*layout, args, tuple(sorted(kwargs.items())))
        recorded = target.recorded.get(key)
        if recorded is not None:
            return [one.repeat(loaded) for one in recorded], recorded
        with self._lock:
            if loaded.dtype not in target.stand_ins:
                target.stand_ins[loaded.dtype] = make_stand_in(target.parameter, loaded.dtype)
            stand_in = target.stand_ins[loaded.dtype]
        writes = writes_of(native, stand_in, loaded, args, kwargs)
        if target.is_repeatable and writes:
            taken = [write.taken_from(loaded) for write in writes]
            if all(one is not None for one in taken):
                target.recorded[key] = [one for one in taken if one is not None]
        return writes, target.recorded.get(key)

    def _store_pair(self, call: Call, pair: HalfPair | None) -> None:
        if pair is None:
            return
        copies = store_pair(pair, self.options.weight_block_size)
        if call.recording is not None:
            call.recording.add_pair(pair, copies)
        for write in pair.writes:
            self.report.written(pair.target, write.region)

    def apply(self, call: Call, target: Target, name: str, write: Write) -> None:
        """Do one write; a block or row that is not finite is noted, not stored."""
        if write.source is None:
            # The padding of a vocabulary: no checkpoint has it, and it is no older than the rest.
            write.destination(target.parameter).fill_(write.fill)
            self.report.written(target, write.region)
            return
        if target.is_fp8:
            for *arguments, bad in quantize_write(target, name, write, self.options):
                call.not_finite.append((name, bad))
                self.report.refit.noise.add(target.granularity, *arguments)
        elif write.source.is_floating_point():
            destination = write.destination(target.parameter)
            source = write.source.to(destination.device)
            call.not_finite.append((name, copy_finite_into(source, destination)))
        else:
            write.destination(target.parameter).copy_(write.source)
        self.report.written(target, write.region)


def part_of(args: tuple, kwargs: dict) -> tuple:
    """Which part of a parameter a loader call is for; the same for a weight and its scale.

    A fused layer is passed a shard id, an expert its weight's name, shard id and number.
    """
    given = (*args, *(value for _, value in sorted(kwargs.items())))
    return tuple(
        value.removesuffix("_inv").removesuffix("_scale") if isinstance(value, str) else value
        for value in given
    )


def _refuse(call: Call, position: int | None, reason: str) -> None:
    if call.recording is not None:
        call.recording.refuse(position, reason)


def _wait(call: Call, position: int | None) -> None:
    if call.recording is not None:
        call.recording.wait(position)
