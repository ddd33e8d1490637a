"""Which names a model takes, where each lands, and which it does without: learnt while its own `load_weights` runs.

At startup this is the load of the checkpoint. Where nothing was loaded (`--load-format dummy`, or a
plan without weights) the same loaders see tensors on `meta`, under the names and shapes of
`checkpoint.py`: a *probe*, which stores nothing.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..arrival.sent_tensors import Source
from ..interception import Region, Write, box_of, is_row_major
from .parameters import Target


@dataclass(frozen=True)
class Landing:
    """One loader call for one tensor.

    Attributes:
        part: see `parameters.part_of`.
        boxes: of the sent tensor, what this rank stores (maybe nothing); None for what is not a plain box of it.
        regions: of the parameter, where each of them lands.
    """

    target: Target
    part: tuple
    boxes: tuple[Region | None, ...]
    regions: tuple[Region | None, ...]


@dataclass
class Known:
    """A name that the model takes.

    Attributes:
        shape: of the full tensor.
        reason: what more than copies SGLang makes of it; empty if nothing.
    """

    shape: tuple[int, ...]
    landings: list[Landing] = field(default_factory=list)
    reason: str = ""

    @property
    def is_counted(self) -> bool:
        """Whether the boxes that it lands in say whether it came."""
        boxes = [box for one in self.landings for box in one.regions]
        return bool(self.landings) and not self.reason and None not in boxes


class NameTable:
    """Filled by one load or probe, complete from then on.

    Attributes:
        unknown_because: why it is not known what a full refit writes; empty if it is.
    """

    def __init__(self) -> None:
        self.known: dict[str, Known] = {}
        self.unused: dict[str, None] = {}
        self.unknown_because = ""
        self._lock = threading.Lock()

    def landed(
        self, sources: Iterable[Source], target: Target, part: tuple, writes: Sequence[Write]
    ) -> None:
        """What one loader call wrote into a target was made of these sent tensors."""
        copies = [write for write in writes if write.source is not None]
        regions = tuple(write.region for write in copies)
        for source in sources:
            boxes = tuple(_box(source, write) for write in copies)
            landing = Landing(target, part, boxes, regions)
            with self._lock:
                self.known.setdefault(source.name, Known(source.shape)).landings.append(landing)

    def made_into(self, native: Mapping[Source, str], consumed: Container[str]) -> None:
        """Of sent tensors that reached the model, what else than copies was made of them."""
        for source, reason in native.items():
            if source.name in consumed:
                self.known.setdefault(source.name, Known(source.shape)).reason = reason

    def forget(self) -> None:
        """What was learnt is not all."""
        self.known, self.unused = {}, {}

    def not_taken(self, names: list[str]) -> None:
        """Names of the checkpoint that no parameter's loader was called for."""
        self.unused.update(dict.fromkeys(name for name in names if name not in self.known))


def _box(sent: Source, write: Write) -> Region | None:
    """Which box of what was sent a write takes; None for a tensor that the loader made, or turned."""
    view = write.source
    assert view is not None
    if not is_row_major(write.shape, write.stride):
        return None
    return box_of(sent.offset_of(view), view, sent.shape)


# Some trainers keep them as buffers.
_ROTARY_TABLES = r"(^|\.)rotary_emb\.(inv_freq|cos_cached|sin_cached)$"


def left_out(model: Any, names: NameTable) -> list[dict[str, str]]:
    """Patterns of names that every rank of this model does without, each with its reason.

    What is tied is the same tensor under another name, which `equals` has where it is known.
    """
    config = getattr(model, "config", None)
    config = getattr(config, "text_config", config)
    rows = [{"pattern": _ROTARY_TABLES, "reason": "a rotary table: the engine computes it"}]
    if getattr(config, "tie_word_embeddings", False):
        row = {"pattern": r"(^|\.)lm_head\.weight$", "reason": "tied to the embedding"}
        shape = getattr(config, "vocab_size", 0), getattr(config, "hidden_size", 0)
        embeddings = _embeddings(names, shape)
        rows.append(row | ({"equals": embeddings[0]} if len(embeddings) == 1 else {}))
    # Layers behind the last one are an embedded draft: the draft model takes them, if any.
    first = getattr(config, "num_hidden_layers", 0)
    count = getattr(config, "num_nextn_predict_layers", None) or 0
    for layer in range(first, first + count):
        reason = f"layer {layer} is the embedded draft model's (MTP)"
        rows.append({"pattern": rf"(^|\.)layers\.{layer}\.", "reason": reason})
    return rows


def _embeddings(names: NameTable, shape: tuple[int, int]) -> list[str]:
    """Names of vocabulary embeddings of that shape."""
    from sglang.srt.layers.vocab_parallel_embedding import VocabParallelEmbedding

    return [
        name
        for name, known in names.known.items()
        if known.shape == shape
        and all(isinstance(one.target.module, VocabParallelEmbedding) for one in known.landings)
    ]


def why_left_out(name: str, rows: Iterable[Mapping[str, str]]) -> Mapping[str, str]:
    """The row of `left_out` for that name; empty if the model takes it."""
    return next((row for row in rows if re.search(row["pattern"], name)), {})
