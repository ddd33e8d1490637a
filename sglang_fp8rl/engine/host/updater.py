"""What answers SGLang's requests that write, release or read served weights: a class in place of its own.

Each method asks SGLang's own; for models that are served otherwise it does nothing else.
"""

from __future__ import annotations

from typing import Any

from sglang.srt.managers.scheduler_components.weight_updater import SchedulerWeightUpdaterManager

from ...compat import SESSIONS_SINCE, host_version
from ..arrival.update import Origin
from .other_calls import note_released_weights, read_unfolded
from .sessions import begin_session, end_session
from .update_request import answer_update


class RefitUpdater(SchedulerWeightUpdaterManager):
    """Requests of an update are answered whatever happens, on every rank alike; a session is one refit."""

    def update_weights_from_tensor(self, recv_req: Any) -> Any:
        return answer_update(Origin.TENSOR, super(), self, recv_req)

    def update_weights_from_distributed(self, recv_req: Any) -> Any:
        return answer_update(Origin.DISTRIBUTED, super(), self, recv_req)

    def update_weights_from_disk(self, recv_req: Any) -> Any:
        return answer_update(Origin.DISK, super(), self, recv_req)

    def update_weights_from_ipc(self, recv_req: Any) -> Any:
        return answer_update(Origin.IPC, super(), self, recv_req)

    if (host_version() or SESSIONS_SINCE) >= SESSIONS_SINCE:

        def begin_weight_update(self, recv_req: Any) -> Any:
            return begin_session(super().begin_weight_update, self, recv_req)

        def end_weight_update(self, recv_req: Any) -> Any:
            return end_session(super().end_weight_update, self, recv_req)

    def release_memory_occupation(self, recv_req: Any) -> Any:
        result = super().release_memory_occupation(recv_req)
        note_released_weights(self, recv_req)
        return result

    # Who reads served weights gets them as they were sent.

    def get_weights_by_name(self, recv_req: Any) -> Any:
        return read_unfolded(super().get_weights_by_name, self, recv_req)

    def check_weights(self, recv_req: Any) -> Any:
        return read_unfolded(super().check_weights, self, recv_req)

    def save_remote_model(self, params: Any) -> Any:
        return read_unfolded(super().save_remote_model, self, params)

    def save_sharded_model(self, params: Any) -> Any:
        return read_unfolded(super().save_sharded_model, self, params)
