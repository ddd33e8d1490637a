"""One pass through `model.load_weights`, and what went wrong in it."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from ...errors import RefitError
from ..arrival.sent_tensors import SourceIndex
from ..arrival.update_scope import UpdateScope
from .checks import MAX_LISTED
from .recording import Recording
from .stream_lane import StreamLane


@dataclass
class Call:
    """What is known of a call while it runs.

    Attributes:
        scope: the update it belongs to.
        recording: what the loaders do with this bucket, where it may be replayed later.
        sources: the tensors that went by.
        errors: names, and what went wrong with them.
        touched: names, and which part of the model each was for.
        stopped_at: the name whose loader raised.
        not_finite: per write, the name and a bool tensor of blocks that kept their old bytes.
        unneeded: names that the model does without, and that may pass.
        kv_scales: names of scales that were read, and are to be read again when the bucket comes again.
        lane: what the loaders' work is queued on, whichever thread they run in.
    """

    scope: UpdateScope
    recording: Recording | None = None
    sources: SourceIndex = field(init=False)
    errors: dict[str, str] = field(default_factory=dict)
    touched: dict[str, tuple] = field(default_factory=dict)
    stopped_at: str = ""
    not_finite: list[tuple[str, torch.Tensor]] = field(default_factory=list)
    unneeded: list[str] = field(default_factory=list)
    kv_scales: list[str] = field(default_factory=list)
    lane: StreamLane | None = None

    def __post_init__(self) -> None:
        self.sources = SourceIndex(keeps_tensors=not self.scope.is_read_once)

    def error(self, tensors: int) -> RefitError:
        """All that went wrong, in one error.

        Args:
            tensors: that were sent.
        """
        texts = list(dict.fromkeys(self.errors.values()))
        return RefitError(
            f"an update of {tensors} tensor(s)",
            " | ".join(texts[:MAX_LISTED]),
            f"{len(self.errors)} of them had problems, everything else in this call was stored",
            "Mend what is named and send it again.",
        )
