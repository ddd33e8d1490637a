"""One pass through `model.load_weights`, and what is known of it meanwhile."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import torch

from ...errors import MAX_LISTED, RefitError
from ..arrival.bucket import Bucket
from ..arrival.sent_tensors import SourceIndex
from ..arrival.update import Update
from ..ledger.ledger import NOTHING, Arrived
from .deferred import DeferredWrites
from .observer import Observer
from .recording import Recording


@dataclass
class Call:
    """What is known of a call while it runs.

    Attributes:
        update: that it belongs to.
        bucket: what came; None for a stream, which has to be read to be known.
        brings: what is known of it before it is read; of a stream nothing.
        sources: the tensors that go by.
        observer: of what SGLang does with them; None where a recipe is replayed.
        recording: of what the loaders do with this bucket, where one of its layout may come again.
        deferred: writes that are done together; None where each is done at once.
        lane: what loaders do is done in it, whichever thread they run in.
        raised: what was raised at a write, by name and place, and not made good: subject and text. Some models
            catch what their loaders raise, and a thread's is nobody's.
        errors: names, and what went wrong with them.
        not_finite: per write, the name and a bool tensor of blocks that kept their old bytes.
        narrowed: names of what came with fewer bits than it is served with.
        kv_scales: names of scales that were read, and are to be read again when the bucket comes again.
        tied: position and the other name of tensors that are the same as others, to be looked at again as well.
    """

    update: Update
    sources: SourceIndex
    bucket: Bucket | None = None
    brings: Arrived = NOTHING
    observer: Observer | None = None
    recording: Recording | None = None
    deferred: DeferredWrites | None = None
    lane: Callable[[], AbstractContextManager[None]] = nullcontext
    raised: dict[tuple, tuple[str, str]] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)
    not_finite: list[tuple[str, torch.Tensor]] = field(default_factory=list)
    narrowed: dict[str, None] = field(default_factory=dict)
    kv_scales: list[str] = field(default_factory=list)
    tied: dict[int, str] = field(default_factory=dict)

    @property
    def size(self) -> int:
        """Tensors that were sent."""
        return len(self.sources.names) if self.bucket is None else self.brings.tensors

    @property
    def brought(self) -> Arrived:
        """What is known of it behind the call."""
        return self.brings._replace(
            tensors=self.size,
            nbytes=self.sources.nbytes if self.bucket is None else self.brings.nbytes,
            has_taken=self.brings.has_taken or bool(self.sources.consumed),
            narrowed=self.brings.narrowed or tuple(self.narrowed),
        )

    @property
    def names(self) -> list[str]:
        """Of what was sent; of a stream, of what has come by now."""
        return list(self.sources.names) if self.bucket is None else self.bucket.names

    @property
    def error(self) -> RefitError:
        """All that went wrong, in one error."""
        texts = list(dict.fromkeys(self.errors.values()))
        return RefitError(
            f"an update of {self.size} tensor(s)",
            " | ".join(texts[:MAX_LISTED]),
            f"{len(self.errors)} of them had problems, everything else in this call was stored",
            "Mend what is named and send all of it again.",
        )
