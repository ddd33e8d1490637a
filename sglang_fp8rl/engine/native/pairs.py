"""Weights that arrive in FP8: code and scale are stored together, or not at all."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field, replace

import torch

from ...errors import RefitError
from ...numerics.cast import has_nan_code
from ...numerics.grid import PerChannel
from ..arrival.sent_tensors import Source
from ..interception import Write
from ..model.parameters import Target
from ..modules.packed_scales import are_no_exponents


@dataclass
class Half:
    """One of the two tensors of an FP8 weight, as it arrived.

    Attributes:
        source: where it came from; None once it was kept for another call.
        writes: of the codes.
    """

    name: str
    tensor: torch.Tensor
    source: Source | None
    writes: list[Write] = field(default_factory=list)


@dataclass
class Pair:
    """What has arrived of one FP8 weight (one logical matrix of a fused layer), first in the call of that stamp."""

    target: Target
    stamp: int
    weight: Half | None = None
    scale: Half | None = None

    @property
    def both(self) -> tuple[Half, Half]:
        """Codes and scale of a pair that is complete."""
        assert self.weight is not None
        assert self.scale is not None
        return self.weight, self.scale


class PairTable:
    """Joins FP8 weights with their scales, in whichever order they come.

    Two halves meet that have one target and one `key`, the part of the target that they are for, within
    one refit.
    """

    def __init__(self) -> None:
        self.halves: dict[tuple, Pair] = {}
        self._lock = threading.Lock()

    def drop_before(self, since: int) -> None:
        """A call begins whose refit has been running since that stamp: what waits from before is of another."""
        self.halves = {key: pair for key, pair in self.halves.items() if pair.stamp >= since}

    def add(
        self, target: Target, key: tuple, stamp: int, half: Half, *, is_scale: bool
    ) -> Pair | None:
        """Take a half; `target` is the weight's. Returns the pair when this completed it."""
        with self._lock:
            pair = self.halves.setdefault((id(target), key), Pair(target, stamp))
            if is_scale:
                pair.scale = half
            else:
                pair.weight = half
            if pair.weight is None or pair.scale is None:
                return None
            return self.halves.pop((id(target), key))

    def open_halves(self) -> dict[str, str]:
        """Names of the halves that wait for the other one, each with a line that says so."""
        found = {}
        for pair in self.halves.values():
            if pair.weight is not None:
                found[pair.weight.name] = f"{pair.weight.name}: FP8 without its scale"
            elif pair.scale is not None:
                found[pair.scale.name] = f"{pair.scale.name}: a scale without its FP8 weight"
        return found

    def give_up(self) -> dict[str, str]:
        """Drop halves that are still waiting; returns their names and what is missing."""
        halves = self.open_halves()
        self.drop()
        return {
            name: f"{text}; both halves of an FP8 weight belong into one call (or one session, or one refit with a name), "
            "and the half that came was not stored. Send them together"
            for name, text in halves.items()
        }

    def drop(self) -> None:
        """Halves never outlive their refit: the other one would be of other weights."""
        self.halves.clear()

    def detach(self) -> None:
        """Copy what is kept beyond the call: the sender takes its memory back after the reply."""
        for pair in self.halves.values():
            for half in (pair.weight, pair.scale):
                if half is not None and half.source is not None:
                    kept = half.tensor.clone()
                    half.writes = [_moved(write, half.tensor, kept) for write in half.writes]
                    half.tensor, half.source = kept, None


def _moved(write: Write, old: torch.Tensor, new: torch.Tensor) -> Write:
    assert write.source is not None
    offset = write.source.storage_offset() - old.storage_offset()
    return replace(write, source=new.as_strided(write.source.shape, write.source.stride(), offset))


@dataclass(frozen=True)
class PairCopy:
    """One block of an FP8 weight, and the scales that belong to it.

    Attributes:
        write: the codes; its source is a view of what was sent.
        scale_source, scale_destination: FP32 [row blocks, column blocks].
        block_n: rows of codes per row of scales.
    """

    write: Write
    scale_source: torch.Tensor
    scale_destination: torch.Tensor
    block_n: int


def store_pair(pair: Pair) -> list[PairCopy]:
    """Copy the codes, and the block scales (or row scales) that belong to this rank's part.

    Returns:
        what was copied.

    Raises:
        RefitError: the scale has the wrong shape or a value that is no scale (or no power of two,
            where it is served as an exponent), a code is NaN, or the loader did not take a plain view.
            Nothing was copied.
        QuantizationError: this rank's part starts inside a block.
    """
    copies = _copies_of(pair)
    for copy in copies:
        source = copy.write.source
        assert source is not None
        codes = copy.write.destination(pair.target.parameter)
        codes.view(torch.uint8).copy_(source.view(torch.uint8))
        copy.scale_destination.copy_(copy.scale_source)
    return copies


def bad_scale_error(name: str) -> RefitError:
    return RefitError(
        name,
        "a scale that is not a positive finite number",
        "every weight_scale_inv multiplies FP8 codes",
        "Look for NaN or Inf in the trainer's weight; rows of blocks with such a scale, or the whole "
        "tensor, keep their old bytes.",
    )


def nan_code_error(name: str) -> RefitError:
    return RefitError(
        name,
        "a code that is NaN (0x7F or 0xFF)",
        "every FP8 code is a number",
        "Quantize with sglang_fp8rl.quantize_blockwise / quantize_per_channel, which refuse NaN; rows "
        "with such a code, or the whole tensor, keep their old codes.",
    )


def check_exponents(scale: torch.Tensor, scale_name: str) -> None:
    """Scales for a parameter whose kernel reads exponents are powers of two. Waits for a GPU.

    Raises:
        RefitError: by name, if not.
    """
    wrong = are_no_exponents(scale)
    if bool(wrong.any()):
        raise RefitError(
            scale_name,
            f"{float(scale[wrong][0])!r}, a scale that is not a power of two",
            "DeepGEMM on this GPU reads scales as exponents, and rounding them now would change the "
            "weight; nothing of the pair was stored",
            "Set use_weight_pow2_scale to true in quantization_config and quantize by the server's plan "
            "(pow2_scale=True of quantize_blockwise), or send BF16.",
        )


def check_numbers(codes: torch.Tensor, scale: torch.Tensor, name: str, scale_name: str) -> None:
    """Codes and scales that arrived are numbers, the scales positive. Waits for a GPU.

    Args:
        codes: e4m3fn, or their bytes.

    Raises:
        RefitError: by name, if not.
    """
    if not bool((torch.isfinite(scale) & (scale > 0)).all()):
        raise bad_scale_error(scale_name)
    if has_nan_code(codes):
        raise nan_code_error(name)


def starts_of(name: str, weight: torch.Tensor, writes: list[Write]) -> list[tuple[int, int]]:
    """First row and column, in a contiguous `weight`, of what each write takes.

    Raises:
        RefitError: one takes no plain block of it, or writes no box: the loader turned or copied it.
    """
    starts = [_start_of(weight, write) for write in writes]
    if None in starts:
        raise RefitError(
            name,
            "a write that is not a plain block of the tensor that was sent",
            "the scales of an FP8 tensor can only be split along with its rows and columns",
            "Send this tensor in BF16 or FP32.",
        )
    return [start for start in starts if start is not None]


def _start_of(weight: torch.Tensor, write: Write) -> tuple[int, int] | None:
    source, region, shape = write.source, write.region, write.shape
    if source is None or region is None or weight.dim() != 2 or region.shape[-2:] != shape:
        return None
    rows, columns = weight.shape
    first = int(source.storage_offset() - weight.storage_offset())
    row, column = divmod(first, columns) if columns else (0, 0)
    is_in_it = (
        source.untyped_storage()._cdata == weight.untyped_storage()._cdata
        and source.dtype == weight.dtype
        and tuple(source.shape) == shape
        and all(
            size == 1 or step == full
            for size, step, full in zip(shape, source.stride(), (columns, 1), strict=True)
        )
        and 0 <= row <= rows - shape[0]
        and column <= columns - shape[1]
    )
    return (row, column) if is_in_it else None


def _copies_of(pair: Pair) -> list[PairCopy]:
    target, (weight, scale) = pair.target, pair.both
    granularity = target.shares_scale
    sent = granularity.grid(weight.tensor.shape)
    shapes: list[tuple[int, ...]] = [sent.scale_shape]
    if isinstance(granularity, PerChannel):
        shapes.append(sent.scale_shape[:1])
    sent_scale = scale.tensor
    if sent_scale.dtype != torch.float32 or tuple(sent_scale.shape) not in shapes:
        raise RefitError(
            scale.name,
            f"{sent_scale.dtype} of shape {tuple(sent_scale.shape)}",
            f"the scale of {weight.name} {tuple(weight.tensor.shape)} is FP32 of shape "
            f"{sent.scale_shape}",
            "Quantize with sglang_fp8rl.quantize_blockwise / quantize_per_channel, or send BF16.",
        )
    sent_scale = sent_scale.reshape(sent.scale_shape)
    check_numbers(weight.tensor, sent_scale, weight.name, scale.name)
    if target.takes_packed_scales:
        check_exponents(sent_scale, scale.name)
    starts = starts_of(weight.name, weight.tensor, weight.writes)
    copies = []
    for write, start in zip(weight.writes, starts, strict=True):
        assert write.region is not None
        source = sent.scales_of(start, write.shape, name=weight.name)
        (destination,) = target.scales_of(weight.name, write.region)
        copies.append(PairCopy(write, sent_scale[source], destination, sent.block[0]))
    return copies
