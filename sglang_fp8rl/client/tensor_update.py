"""One update over HTTP: a session where the server knows them, its buckets, its flush.

What a bucket looks like on the wire is `wire.bucket`'s business.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from ..errors import NoAnswerError, RefitError
from ..wire import layout_text
from ..wire.bucket import NamedTensor, allocate, buckets_of, each_once, nbytes_of, payload_of
from ..wire.plan import STATUS_PATH
from ..wire.refit_note import RefitNote
from ..wire.staging import StagingBuffers
from .connection import Connection, PipelinedSender, Progress

SERVER_INFO_PATH = "/server_info"


@dataclass(frozen=True)
class Receiver:
    """What a server says of how it may be updated.

    Attributes:
        tp_size: ranks, each of which gets a payload.
        reads_text: whether it reads a bucket's layout as one text. Only a server of this package
            does, and only that has read all of a bucket when it answers.
        reads_notes: whether it reads a `RefitNote`.
    """

    tp_size: int
    reads_text: bool
    reads_notes: bool

    @classmethod
    def of(cls, server_info: dict[str, Any]) -> Receiver:
        """From what `GET /server_info` answers; replicas of one server all read alike.

        Raises:
            RefitError: SGLang updates no such server from tensors, and says so by HTTP 500.
        """
        replicas = server_info.get("dp_size") or 1
        if replicas > 1 and not server_info.get("enable_dp_attention"):
            raise RefitError(
                "the server",
                f"{replicas} data-parallel replicas",
                "SGLang takes tensors for a server of one replica, or with DP attention",
                "Start a server for each replica (sglang_router balances them), or use "
                "--enable-dp-attention, or update_weights_from_disk.",
            )
        section = (server_info.get("internal_states") or [{}])[0].get("fp8rl") or {}
        return cls(
            int(server_info["tp_size"]),
            section.get("flat_layout") == layout_text.VERSION,
            "state" in section,
        )


class TensorUpdate:
    """One refit of one server.

    Args:
        connection: to it.
        receiver: what it says of itself.
        note: what it is told of this refit.
    """

    def __init__(self, connection: Connection, receiver: Receiver, note: RefitNote) -> None:
        self._connection, self._receiver = connection, receiver
        self._told = {"rid": note.to_text()} if receiver.reads_notes else {}
        self._is_flush_refused = False

    def send(
        self,
        named_tensors: Iterable[NamedTensor],
        *,
        bucket_bytes: int,
        load_format: str | None,
        on_bucket: Progress | None,
    ) -> PipelinedSender:
        """Send all of them; args as `RefitClient.update`. Returns the sender, with its counts.

        Raises:
            RefitError: the server refused, or there was nothing to send.
        """
        reads_text = self._receiver.reads_text
        staging = StagingBuffers(allocate) if reads_text else None
        buckets = buckets_of(each_once(named_tensors), bucket_bytes)
        first = next(buckets, None)
        if first is None:  # no session is opened for nothing
            raise RefitError(
                "an update",
                "an empty iterable",
                "it names at least one tensor",
                "Check the source.",
            )
        with (
            self._session() as in_session,
            PipelinedSender(self._post_bucket, on_bucket) as sender,
        ):
            for bucket, is_last in itertools.chain([first], buckets):
                if staging is not None:
                    staging.least = 0 if is_last else bucket_bytes
                payload = payload_of(
                    bucket, load_format, self._receiver.tp_size, reads_text, staging
                )
                body = {
                    "serialized_named_tensors": payload.texts,
                    "load_format": load_format,
                    "flush_cache": is_last,
                    **({} if in_session else self._told),
                }
                sender.send(body, payload, len(bucket), sum(nbytes_of(t) for _, t in bucket))
            sender.finish()
        return sender

    def flush(self, timeout: float) -> bool:
        """Ask for the flush again if it was refused. Returns whether it is done.

        Args:
            timeout: seconds to wait for running requests.
        """
        return not self._is_flush_refused or self._connection.flush_cache(timeout)

    @contextlib.contextmanager
    def _session(self) -> Iterator[bool]:
        """Whether the server knows sessions; then one is open in here."""
        has_sessions = self._connection.post_admin_if_known("/begin_weight_update", self._told)
        try:
            yield has_sessions
        except BaseException:
            # The reason why it failed is worth more than a second failure to close.
            if has_sessions:
                with contextlib.suppress(RefitError):
                    end_session(self._connection)
            raise
        if has_sessions:
            end_session(self._connection)

    def _post_bucket(self, body: dict[str, Any]) -> Any:
        try:
            return self._connection.post_admin("/update_weights_from_tensor", body)
        except NoAnswerError:
            raise
        except RefitError:
            if not (body["flush_cache"] and self._is_only_flush_refused()):
                raise
            self._is_flush_refused = True

    def _is_only_flush_refused(self) -> bool:
        """SGLang answers alike where nothing was stored and where only its flush was refused."""
        if not self._receiver.reads_notes:
            return False
        last = self._connection.get(STATUS_PATH, "the status").json().get("last_refit") or {}
        return last.get("cache_flushed") is False and last["outcome"] in ("open", "ok")


def end_session(connection: Connection) -> None:
    connection.post_admin("/end_weight_update", {})
