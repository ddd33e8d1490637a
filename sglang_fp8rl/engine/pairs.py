"""Weights that arrive in FP8: code and scale are stored together, or not at all."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

import torch

from ..errors import RefitError
from ..numerics.tp_split import Span, scale_span
from ..scheme import Granularity
from .targets import Target
from .writes import Write


@dataclass
class HalfPair:
    """What has arrived of one FP8 weight (one logical matrix of a fused layer)."""

    target: Target
    weight_name: str = ""
    weight: torch.Tensor | None = None
    writes: list[Write] = field(default_factory=list)
    scale_name: str = ""
    scale: torch.Tensor | None = None

    @property
    def is_complete(self) -> bool:
        return self.weight is not None and self.scale is not None

    def missing(self) -> tuple[str, str]:
        """The name of the half that came, and a line on the half that did not."""
        if self.weight is not None:
            return self.weight_name, f"{self.weight_name}: FP8 without its scale"
        return self.scale_name, f"{self.scale_name}: a scale without its FP8 weight"


class PairTable:
    """Joins FP8 weights with their scales, in whichever order they come."""

    def __init__(self) -> None:
        self._halves: dict[tuple, HalfPair] = {}
        self._lock = threading.Lock()

    def add_weight(
        self, target: Target, args: tuple, name: str, weight: torch.Tensor, writes: list[Write]
    ) -> HalfPair | None:
        """Returns the pair when this completed it."""
        with self._lock:
            half = self._halves.setdefault((id(target), args), HalfPair(target))
            half.weight_name, half.weight, half.writes = name, weight, writes
            return self._take(half, (id(target), args))

    def add_scale(
        self, target: Target, args: tuple, name: str, scale: torch.Tensor
    ) -> HalfPair | None:
        """`target` is the weight's. Returns the pair when this completed it."""
        with self._lock:
            half = self._halves.setdefault((id(target), args), HalfPair(target))
            half.scale_name, half.scale = name, scale
            return self._take(half, (id(target), args))

    def _take(self, half: HalfPair, key: tuple) -> HalfPair | None:
        return self._halves.pop(key) if half.is_complete else None

    def open_halves(self) -> dict[str, str]:
        """Names of the halves that wait for the other one, each with a line that says so."""
        return dict(half.missing() for half in self._halves.values())

    def drop(self) -> None:
        self._halves.clear()

    def detach(self) -> None:
        """Copy what is kept beyond the call: the sender takes its memory back after the reply."""
        for half in self._halves.values():
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


def store_pair(pair: HalfPair, block_size: tuple[int, int]) -> None:
    """Copy the codes, and the block scales (or row scales) that belong to this rank's part.

    Raises:
        RefitError: the scale has the wrong shape, or the loader did not take a plain view.
        QuantizationError: this rank's part starts inside a block.
    """
    target, weight, scale = pair.target, pair.weight, pair.scale
    assert weight is not None
    assert scale is not None
    assert target.scale is not None
    blockwise = target.granularity is Granularity.BLOCKWISE
    block_n, block_k = block_size if blockwise else (1, weight.shape[1])
    rows, columns = weight.shape
    expected = (-(-rows // block_n), -(-columns // block_k))
    if scale.dtype != torch.float32 or not _fits(scale, expected, blockwise):
        raise RefitError(
            pair.scale_name,
            f"{scale.dtype} of shape {tuple(scale.shape)}",
            f"the scale of {pair.weight_name} {tuple(weight.shape)} is FP32 of shape {expected}",
            "Quantize with sglang_fp8rl.quantize_blockwise / quantize_per_channel, or send BF16.",
        )
    scale = scale.reshape(expected)
    if not bool((torch.isfinite(scale) & (scale > 0)).all()):
        raise RefitError(
            pair.scale_name,
            "a scale that is not a positive finite number",
            "every weight_scale_inv multiplies FP8 codes",
            "Look for NaN or Inf in the trainer's weight; nothing was written.",
        )
    plan = []
    for write in pair.writes:
        region = write.region
        is_matrix = (
            len(write.shape) == 2 and region is not None and region.shape[-2:] == write.shape
        )
        if write.source is None or not is_matrix:
            raise RefitError(
                pair.weight_name,
                "a write that is not a plain block of the tensor that was sent",
                "the scales of an FP8 tensor can only be split along with its rows and columns",
                "Send this tensor in BF16 or FP32.",
            )
        first = int(write.source.storage_offset() - weight.storage_offset())
        row, column = divmod(first, columns)
        owned_rows = scale_span(Span(row, write.shape[0]), block_n, rows, name=pair.weight_name)
        owned_columns = scale_span(
            Span(column, write.shape[1]), block_k, columns, name=pair.weight_name
        )
        plan.append((write, owned_rows, owned_columns))
    for write, owned_rows, owned_columns in plan:
        assert write.source is not None
        assert write.region is not None
        scales = target.scale.data
        if scales.dim() == 3:  # one matrix per expert
            scales = scales[write.region.start[0]]
        to_row, to_column = (
            start // block
            for start, block in zip(write.region.start[-2:], (block_n, block_k), strict=True)
        )
        write.destination(target.parameter).view(torch.uint8).copy_(write.source.view(torch.uint8))
        scales[to_row : to_row + owned_rows.size, to_column : to_column + owned_columns.size].copy_(
            scale[owned_rows.start : owned_rows.stop, owned_columns.start : owned_columns.stop]
        )


def _fits(scale: torch.Tensor, expected: tuple[int, int], blockwise: bool) -> bool:
    shape = tuple(scale.shape)
    return shape == expected or (not blockwise and shape == expected[:1])
