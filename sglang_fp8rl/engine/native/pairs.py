"""Weights that arrive in FP8: code and scale are stored together, or not at all."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

import torch

from ...errors import RefitError
from ...numerics.cast import has_nan_code
from ...numerics.grid import PerChannel, granularity_of
from ..arrival.sent_tensors import Source
from ..interception.writes import Write
from ..model.parameters import Target
from ..modules.packed_scales import are_no_exponents


@dataclass
class HalfPair:
    """What has arrived of one FP8 weight (one logical matrix of a fused layer), in the call of that stamp."""

    target: Target
    stamp: int = 0
    weight_name: str = ""
    weight: torch.Tensor | None = None
    writes: list[Write] = field(default_factory=list)
    scale_name: str = ""
    scale: torch.Tensor | None = None
    # Where the halves came from; None once they were kept for another call.
    weight_from: Source | None = None
    scale_from: Source | None = None

    @property
    def is_complete(self) -> bool:
        return self.weight is not None and self.scale is not None

    def missing(self) -> tuple[str, str]:
        """The name of the half that came, and a line on the half that did not."""
        if self.weight is not None:
            return self.weight_name, f"{self.weight_name}: FP8 without its scale"
        return self.scale_name, f"{self.scale_name}: a scale without its FP8 weight"


class PairTable:
    """Joins FP8 weights with their scales, in whichever order they come.

    Two halves meet that have one target and one `key`, the part of the target that they are for, within
    one refit.
    """

    def __init__(self) -> None:
        self._halves: dict[tuple, HalfPair] = {}
        self._stamp = 0
        self._lock = threading.Lock()

    def start_call(self, since: int, stamp: int) -> None:
        """A call of that stamp begins; its refit has since been running, and what waits from before is dropped."""
        self._stamp = stamp
        self._halves = {key: half for key, half in self._halves.items() if half.stamp >= since}

    def add_weight(
        self,
        target: Target,
        key: tuple,
        name: str,
        weight: torch.Tensor,
        writes: list[Write],
        source: Source | None,
    ) -> HalfPair | None:
        """Returns the pair when this completed it."""
        with self._lock:
            half = self._halves.setdefault((id(target), key), HalfPair(target, self._stamp))
            half.weight_name, half.weight, half.writes = name, weight, writes
            half.weight_from = source
            return self._take(half, (id(target), key))

    def add_scale(
        self, target: Target, key: tuple, name: str, scale: torch.Tensor, source: Source | None
    ) -> HalfPair | None:
        """`target` is the weight's. Returns the pair when this completed it."""
        with self._lock:
            half = self._halves.setdefault((id(target), key), HalfPair(target, self._stamp))
            half.scale_name, half.scale, half.scale_from = name, scale, source
            return self._take(half, (id(target), key))

    def _take(self, half: HalfPair, key: tuple) -> HalfPair | None:
        return self._halves.pop(key) if half.is_complete else None

    def open_halves(self) -> dict[str, str]:
        """Names of the halves that wait for the other one, each with a line that says so."""
        return dict(half.missing() for half in self._halves.values())

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
        self._halves.clear()

    def detach(self) -> None:
        """Copy what is kept beyond the call: the sender takes its memory back after the reply."""
        for half in self._halves.values():
            half.weight_from = half.scale_from = None
            if half.weight is not None:
                kept = half.weight.clone()
                half.writes = [_moved(write, half.weight, kept) for write in half.writes]
                half.weight = kept
            if half.scale is not None:
                half.scale = half.scale.clone()


def _moved(write: Write, old: torch.Tensor, new: torch.Tensor) -> Write:
    assert write.source is not None
    offset = write.source.storage_offset() - old.storage_offset()
    source = new.as_strided(write.source.shape, write.source.stride(), offset)
    return Write(source, write.fill, write.offset, write.shape, write.stride, write.region)


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


def store_pair(pair: HalfPair, block_size: tuple[int, int]) -> list[PairCopy]:
    """Copy the codes, and the block scales (or row scales) that belong to this rank's part.

    Returns:
        what was copied.

    Raises:
        RefitError: the scale has the wrong shape or a value that is no scale (or no power of two,
            where it is served as an exponent), a code is NaN, or the loader did not take a plain view.
            Nothing was copied.
        QuantizationError: this rank's part starts inside a block.
    """
    copies = _copies_of(pair, block_size)
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


def _copies_of(pair: HalfPair, block_size: tuple[int, int]) -> list[PairCopy]:
    target, weight, scale = pair.target, pair.weight, pair.scale
    assert weight is not None
    assert scale is not None
    assert target.scale is not None
    granularity = granularity_of(target.granularity, block_size)
    sent, stored = granularity.grid(weight.shape), granularity.grid(target.parameter.shape)
    shapes: list[tuple[int, ...]] = [sent.scale_shape]
    if isinstance(granularity, PerChannel):
        shapes.append(sent.scale_shape[:1])
    if scale.dtype != torch.float32 or tuple(scale.shape) not in shapes:
        raise RefitError(
            pair.scale_name,
            f"{scale.dtype} of shape {tuple(scale.shape)}",
            f"the scale of {pair.weight_name} {tuple(weight.shape)} is FP32 of shape "
            f"{sent.scale_shape}",
            "Quantize with sglang_fp8rl.quantize_blockwise / quantize_per_channel, or send BF16.",
        )
    scale = scale.reshape(sent.scale_shape)
    check_numbers(weight, scale, pair.weight_name, pair.scale_name)
    if target.takes_packed_scales:
        check_exponents(scale, pair.scale_name)
    copies = []
    for write, start in zip(
        pair.writes, starts_of(pair.weight_name, weight, pair.writes), strict=True
    ):
        region = write.region
        assert region is not None
        name = pair.weight_name
        source = sent.scales_of(start, write.shape, name=name)
        destination = stored.scales_of(region.start[-2:], write.shape, name=name)
        scales = target.scale.data
        if scales.dim() == 3:  # one matrix per expert
            scales = scales[region.start[0]]
        copies.append(PairCopy(write, scale[source], scales[destination], sent.block[0]))
    return copies
