"""Which names a model takes, and where each lands: learnt while its own `load_weights` runs.

At startup this is the load of the checkpoint. Where nothing was loaded (`--load-format dummy`, or a
plan without weights) the same loaders see tensors on `meta`, under the names and shapes of
`checkpoint_names`: a *probe*, which stores nothing.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

import torch

from ..arrival.sent_tensors import Source
from ..interception.region import Region, region_of
from ..interception.writes import Write
from .parameters import Target


@dataclass(frozen=True)
class Landing:
    """One loader call for one tensor.

    Attributes:
        target: the parameter.
        part: what the loader was told (see `native.loader_call.part_of`).
        boxes: of the sent tensor, what this rank stores; None for what is not a plain box of it.
            Empty if this rank stores nothing.
        regions: of the parameter, where each of them lands.
    """

    target: Target
    part: tuple
    boxes: tuple[Region | None, ...]
    regions: tuple[Region | None, ...]


@dataclass
class Known:
    """A name that some parameter takes: its full shape, and where it lands."""

    shape: tuple[int, ...]
    landings: list[Landing] = field(default_factory=list)


class NameTable:
    """Filled by one load or probe, complete from then on."""

    def __init__(self) -> None:
        self.known: dict[str, Known] = {}
        self.unused: dict[str, None] = {}
        self._lock = threading.Lock()

    @property
    def is_filled(self) -> bool:
        return bool(self.known)

    def attention_of(self, sent_prefix: str) -> str | None:
        """The served attention module whose weights are sent below that prefix; None if none are."""
        for leaf in ("k_proj", "qkv_proj"):
            known = self.known.get(f"{sent_prefix}.{leaf}.weight")
            if known is not None:
                return known.landings[0].target.name.rsplit(".", 2)[0]
        return None

    def landed(
        self,
        source: Source | None,
        target: Target,
        part: tuple,
        loaded: torch.Tensor,
        writes: list[Write],
    ) -> None:
        """One loader call: `loaded` is (a view of) what was sent, `writes` what came of it."""
        if source is None:
            return
        copies = [(write.source, write) for write in writes if write.source is not None]
        boxes = tuple(
            _box(source, taken) if _is_row_major(write.shape, write.stride) else None
            for taken, write in copies
        )
        regions = tuple(write.region for _, write in copies)
        with self._lock:
            known = self.known.setdefault(source.name, Known(source.shape))
            known.landings.append(Landing(target, part, boxes, regions))

    def not_taken(self, names: list[str]) -> None:
        """Names of the checkpoint that no parameter's loader was called for."""
        self.unused.update(dict.fromkeys(name for name in names if name not in self.known))


def _box(sent: Source, view: torch.Tensor) -> Region | None:
    """Which box of what was sent a view of it covers; None for a tensor that the loader made, or turned."""
    offset = sent.offset_of(view)
    shape, stride = tuple(view.shape), tuple(view.stride())
    if offset is None or not sent.is_contiguous or not _is_row_major(shape, stride):
        return None
    return region_of(offset, shape, stride, sent.shape)


def _is_row_major(shape: tuple[int, ...], stride: tuple[int, ...]) -> bool:
    steps = [step for size, step in zip(shape, stride, strict=True) if size != 1]
    return steps == sorted(steps, reverse=True)
