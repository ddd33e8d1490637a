"""One pass through `model.load_weights`, the request that it belongs to, and the stream that it works on."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from ...errors import RefitError
from ..arrival.bucket import Bucket
from ..arrival.sent_tensors import Made, Source, SourceIndex
from ..arrival.update_scope import UpdateScope
from ..interception.writes import Write
from ..model.parameters import Target
from ..report.refit_record import Refit
from ..report.report import Arrived
from .checks import MAX_LISTED
from .observer import Observer
from .recording import Recording


@dataclass
class Update:
    """One request of SGLang's, while it is served.

    Attributes:
        calls: of `load_weights` that belong to it.
        refit: that its last call belongs to.
        cache_flushed: whether SGLang flushed its cache; None if it was not asked to.
        error: what ended it, if that was an exception; not of a refused flush.
        touches_target: whether it updates the served model, not a draft alone.
    """

    scope: UpdateScope
    calls: int = 0
    refit: Refit | None = None
    cache_flushed: bool | None = None
    error: str | None = None
    touches_target: bool = True


@dataclass
class Call:
    """What is known of a call while it runs.

    Attributes:
        scope: the update it belongs to.
        bucket: what came; None for a stream, which has to be read to be known.
        brings: what is known of it before it is read; None as long as nothing was looked at.
        recording: what the loaders do with this bucket, where it may be replayed later.
        sources: the tensors that went by.
        errors: names, and what went wrong with them.
        touched: names, and which part of the model each was for.
        stopped_at: the name whose loader raised.
        not_finite: per write, the name and a bool tensor of blocks that kept their old bytes.
        unneeded: names that the model does without, and that may pass.
        kv_scales: names of scales that were read, and are to be read again when the bucket comes again.
        observer: of what happens besides.
        reached: where each write went (a target and its part, or another place), and what it was made of.
        lane: what the loaders' work is queued on, whichever thread they run in.
    """

    scope: UpdateScope
    bucket: Bucket | None = None
    brings: Arrived | None = None
    recording: Recording | None = None
    sources: SourceIndex = field(init=False)
    errors: dict[str, str] = field(default_factory=dict)
    touched: dict[str, tuple] = field(default_factory=dict)
    stopped_at: str = ""
    not_finite: list[tuple[str, torch.Tensor]] = field(default_factory=list)
    unneeded: list[str] = field(default_factory=list)
    kv_scales: list[str] = field(default_factory=list)
    reached: dict[tuple, tuple[Source, ...]] = field(default_factory=dict)
    lane: StreamLane | None = None
    observer: Observer = field(init=False)

    def __post_init__(self) -> None:
        self.sources = SourceIndex(keeps_tensors=not self.scope.is_read_once)

    def made_of(self, tensor: torch.Tensor) -> Made:
        """Which sent tensors `tensor` was made of."""
        return self.sources.made_of(tensor)

    def touch(self, sources: Iterable[Source], target: str, part: tuple) -> None:
        """These sent tensors reached that part of a target."""
        self.sources.consume(sources)
        for source in sources:
            self.touched[source.name] = (target, part)

    def note(self, target: Target, writes: Iterable[Write], sources: tuple[Source, ...]) -> None:
        """These writes are made of these sent tensors."""
        for write in writes:
            self.reached[target.index, write.offset, write.shape] = sources

    @property
    def size(self) -> int:
        """Tensors that were sent."""
        if self.brings is None or self.bucket is None:  # a stream
            return len(self.sources.names)
        return len(self.brings.numbers)

    @property
    def error(self) -> RefitError:
        """All that went wrong, in one error."""
        texts = list(dict.fromkeys(self.errors.values()))
        return RefitError(
            f"an update of {self.size} tensor(s)",
            " | ".join(texts[:MAX_LISTED]),
            f"{len(self.errors)} of them had problems, everything else in this call was stored",
            "Mend what is named and send it again.",
        )


class StreamLane:
    """The current stream of a device, as the thread that makes this object has it.

    Models of DeepSeek's family hand their experts to a thread pool. A new thread has the default stream
    (and the first device) as its own, while the scheduler works on another stream, and reads there
    whether what was cast was finite: without waiting, it would read before the cast has run.

    Args:
        device: of the model.
    """

    def __init__(self, device: torch.device) -> None:
        self._module: Any = torch.get_device_module(device)
        self._stream = self._module.current_stream(device)
        self._thread = threading.get_ident()

    @contextmanager
    def entered(self) -> Iterator[None]:
        """What is queued in here goes to that stream, of that device, in any thread."""
        if threading.get_ident() == self._thread:
            yield
            return
        with self._module.stream(self._stream):
            yield
