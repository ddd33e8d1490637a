"""Weights that arrive in FP8: code and scale are stored together, or not at all."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch

from ...config import Options
from ...errors import RefitError
from ...numerics.cast import has_nan_code
from ...numerics.write_table import Kind, Piece
from ..arrival.sent_tensors import Source
from ..interception import Region, Write, box_of, offset_within, span_of
from ..model.parameters import Target
from ..modules.method import are_no_exponents
from .matrix_writes import store_piece


@dataclass
class Half:
    """One of the two tensors of an FP8 weight, as it arrived.

    Attributes:
        source: where it came from; None once it was kept for another call.
        stamp: of the call that it came in.
        blocks: boxes of the codes, and the writes of [rows, columns] that took them. Where those land by then is
            asked when they are stored.
    """

    name: str
    tensor: torch.Tensor
    source: Source | None
    stamp: int
    is_scale: bool
    blocks: list[tuple[Region, Write]] = field(default_factory=list)

    def keep(self) -> None:
        """Copy it: the sender takes its memory back."""
        self.tensor, self.source = self.tensor.clone(), None


def _sent_twice_error(name: str, other: str, target: str) -> RefitError:
    return RefitError(
        other,
        f"came for the part of {target} that {name} is for",
        "an FP8 weight comes once, and its scale under one name",
        "Send one of the two.",
    )


class PairTable:
    """Joins FP8 weights with their scales, in whichever order they come.

    Two halves meet that have one target and one `key`, the part of the target that they are for, within
    one refit.

    Attributes:
        halves: those that wait, by target, key, and whether it is the scale.
    """

    def __init__(self) -> None:
        self.halves: dict[tuple, Half] = {}
        self._lock = threading.Lock()

    def drop_before(self, since: int) -> None:
        """A call begins whose refit has been running since that stamp: what waits from before is of another."""
        self.halves = {key: half for key, half in self.halves.items() if half.stamp >= since}

    def add(self, target: Target, key: tuple, half: Half) -> tuple[Half, Half] | None:
        """Take a half; `target` is the weight's. Returns codes and scale when this completed them.

        Raises:
            RefitError: another one of its kind waits, under another name.
        """
        with self._lock:
            other = self.halves.pop((id(target), key, not half.is_scale), None)
            if other is None:
                waiting = self.halves.setdefault((id(target), key, half.is_scale), half)
                if waiting.name != half.name:
                    raise _sent_twice_error(waiting.name, half.name, target.name)
                self.halves[id(target), key, half.is_scale] = half
                return None
        return (other, half) if half.is_scale else (half, other)

    def open_halves(self) -> dict[str, str]:
        """Names of the halves that wait for the other one, each with a line that says so."""
        lacking = {False: "FP8 without its scale", True: "a scale without its FP8 weight"}
        return {
            half.name: f"{half.name}: {lacking[half.is_scale]}" for half in self.halves.values()
        }

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

    def detach(self) -> bool:
        """Copy what is kept beyond the call: the sender takes its memory back. Returns whether any half is."""
        came = [half for half in self.halves.values() if half.source is not None]
        for half in came:
            half.keep()
        return bool(came)


def store_pair(
    target: Target, weight: Half, scale: Half, options: Options
) -> list[tuple[Half, Piece]]:
    """Copy the codes of one logical matrix, and the block scales (or row scales) that belong to this rank's part.

    Returns:
        what was copied, scales before their codes.

    Raises:
        RefitError: the scale has the wrong shape or a value that is no scale (or no power of two,
            where it is served as an exponent), or a code is NaN. Nothing was copied.
        QuantizationError: this rank's part starts inside a block.
    """
    copies = _copies_of(target, weight, scale)
    for half, copy in copies:
        store_piece(copy, half.name, options)
    return copies


def _copies_of(target: Target, weight: Half, scale: Half) -> list[tuple[Half, Piece]]:
    """What to copy, once both halves were looked at. Waits for a GPU."""
    held, scales = target.format, scale.tensor
    assert held is not None
    sent, shapes = held.grid(weight.tensor.shape), held.sent_scale_shapes(weight.tensor.shape)
    if scales.dtype != torch.float32 or tuple(scales.shape) not in shapes:
        raise RefitError(
            scale.name,
            f"{scales.dtype} of shape {tuple(scales.shape)}",
            f"the scale of {weight.name} {tuple(weight.tensor.shape)} is FP32 of shape "
            f"{sent.scale_shape}",
            "Quantize with sglang_fp8rl.quantize_blockwise / quantize_per_channel, or send BF16.",
        )
    scales = scales.reshape(sent.scale_shape)
    if not bool((torch.isfinite(scales) & (scales > 0)).all()):
        raise bad_scale_error(scale.name)
    if has_nan_code(weight.tensor):
        raise nan_code_error(weight.name)
    if target.takes_packed_scales:
        check_exponents(scale.name, scales)
    copies = []
    for box, write in weight.blocks:
        assert write.region is not None
        destination, codes = write.destination(target.parameter), weight.tensor[box.slices]
        part = sent.scales_of(box.start, box.shape, name=weight.name)
        (scale_destination,) = target.scales_of(weight.name, write.region)
        of_rows = (sent.block[0], 1)
        copies += [
            (scale, Piece(scales[part], scale_destination, kind=Kind.SCALES)),
            (weight, Piece(codes, destination, block=of_rows, kind=Kind.CODES)),
        ]
    return copies


def check_exponents(name: str, scales: torch.Tensor) -> None:
    """Raises `RefitError` for FP32 scales, served as exponents, that are not all powers of two. Waits for a GPU."""
    wrong = are_no_exponents(scales)
    if bool(wrong.any()):
        raise RefitError(
            name,
            f"{float(scales[wrong][0])!r}, a scale that is not a power of two",
            "DeepGEMM on this GPU reads scales as exponents, and rounding them now would change the "
            "weight; nothing of the pair was stored",
            "Set use_weight_pow2_scale to true in quantization_config and quantize by the server's plan "
            "(pow2_scale=True of quantize_blockwise), or send BF16.",
        )


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


def blocks_of(
    name: str, weight: torch.Tensor, writes: Iterable[Write]
) -> list[tuple[Region, Write]]:
    """Each write that is not empty, and what it takes of a contiguous `weight`.

    Raises:
        RefitError: one takes no plain block of it, or writes no box: the loader turned or copied it.
    """
    blocks = []
    for write in writes:
        if 0 in write.shape:
            continue
        source, region, box = write.source, write.region, None
        if source is not None and source.dtype == weight.dtype and weight.dim() == 2:
            box = box_of(offset_within(span_of(weight), source), source, tuple(weight.shape))
        if box is None or region is None or not box.shape == write.shape == region.shape[-2:]:
            raise RefitError(
                name,
                "a write that is not a plain block of the tensor that was sent",
                "the scales of an FP8 tensor can only be split along with its rows and columns",
                "Send this tensor in BF16 or FP32.",
            )
        blocks.append((box, write._replace(source=None)))  # the sender's memory is not kept by it
    return blocks
