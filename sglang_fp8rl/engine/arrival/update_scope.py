"""Which update a call of `load_weights` belongs to, and what follows from that."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from ...wire.refit_note import RefitNote


class Origin(str, Enum):
    """Where weights come from."""

    STARTUP = "startup"
    PROBE = "probe"  # names on `meta`, nothing is stored
    DISK = "disk"
    TENSOR = "tensor"
    DISTRIBUTED = "distributed"
    IPC = "ipc"


@dataclass(frozen=True)
class UpdateScope:
    """One request of an update, as far as loading is concerned.

    Attributes:
        origin: where its weights come from.
        in_session: whether the client opened a session that is still open.
        is_last_call: whether the client asked for the flush, which those without sessions do last.
        note: what the client says of its refit.
        version: what SGLang calls the new weights, where the request says so.
    """

    origin: Origin
    in_session: bool = False
    is_last_call: bool = True
    note: RefitNote | None = None
    version: str | None = None

    @property
    def is_alone(self) -> bool:
        """Whether one request is one refit."""
        return self.origin in (Origin.DISK, Origin.STARTUP)

    @property
    def stores(self) -> bool:
        """Whether anything is written at all."""
        return self.origin is not Origin.PROBE

    @property
    def learns_names(self) -> bool:
        """Whether the names that go by are those that the model takes."""
        return self.origin in (Origin.STARTUP, Origin.PROBE)

    @property
    def is_serving(self) -> bool:
        """Whether the model is built and has its tensors in place, which captured graphs use."""
        return self.origin not in (Origin.STARTUP, Origin.PROBE)

    @property
    def is_read_once(self) -> bool:
        """Whether tensors are made while they are asked for, and have to be let go of."""
        return self.is_alone

    @property
    def may_replay(self) -> bool:
        """Whether the same layout will come again, as a bucket."""
        return self.origin in (Origin.TENSOR, Origin.DISTRIBUTED)

    @property
    def keeps_halves(self) -> bool:
        """Whether half of an FP8 pair may wait for the other one beyond this call: where the client says
        which calls are of one refit. The scale of one trainer says nothing of the codes of another."""
        return self.in_session or (self.note is not None and not self.is_last_call)


STARTUP = UpdateScope(Origin.STARTUP)
PROBE = UpdateScope(Origin.PROBE)
