"""One request of an update: what it asks for, and what follows from where it comes from."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from ...wire.refit_note import RefitNote
from ...wire.stages import Mark


class Origin(Enum):
    """Where weights come from.

    Attributes:
        is_alone: whether one request is one refit, whose tensors are made while they are asked for.
        is_serving: whether the model is built and has its tensors in place, which captured graphs use.
        stores: whether anything is written at all.
        may_replay: whether the same layout will come again, as a bucket.
    """

    STARTUP = "startup"
    PROBE = "probe"  # names on `meta`, nothing is stored
    DISK = "disk"
    TENSOR = "tensor"
    DISTRIBUTED = "distributed"
    IPC = "ipc"

    def __init__(self, name: str) -> None:
        self.is_alone = name in ("startup", "disk")
        self.is_serving = name not in ("startup", "probe")
        self.stores = name != "probe"
        self.may_replay = name in ("tensor", "distributed")


@dataclass(eq=False)
class Update:
    """One request of SGLang's, or a load or a probe at its start.

    Attributes:
        in_session: whether the client opened a session that is still open.
        is_last_call: whether the client asked for the flush, which those without sessions do last.
        note: what the client says of its refit.
        version: what SGLang calls the new weights, where the request says so.
        ends_session: whether it is the end of a session, which brings nothing.
        touches_target: whether it updates the served model, not a draft alone.
        calls, tensors: of `load_weights` that belong to it, so far, and what came in them.
        refit: that its last call belongs to.
        refit_number: of the refit that other ranks began in it, and this one did not; known when all have said so.
        cache_flushed: whether SGLang flushed its cache; None if it was not asked to.
        marks: when it came to which of the stages.
    """

    origin: Origin
    in_session: bool = False
    is_last_call: bool = True
    note: RefitNote | None = None
    version: str | None = None
    ends_session: bool = False
    touches_target: bool = True
    calls: int = 0
    tensors: int = 0
    refit: Any = None
    refit_number: int | None = None
    cache_flushed: bool | None = None
    marks: list[Mark] = field(default_factory=list)

    @property
    def keeps_halves(self) -> bool:
        """Whether half of an FP8 pair may wait for the other one beyond this call: where the client says
        which calls are of one refit. The scale of one trainer says nothing of the codes of another."""
        return self.in_session or (self.note is not None and not self.is_last_call)
