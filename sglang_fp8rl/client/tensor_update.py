"""One refit over HTTP: a session where the server knows them, its buckets, its version, its flush."""

from __future__ import annotations

import contextlib
import functools
import itertools
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from time import perf_counter
from typing import Any

import torch

from ..errors import NoAnswerError, RefitError
from ..wire import layout_text
from ..wire.bucket import Bucket, Payload, buckets_of
from ..wire.listed import Listed
from ..wire.plan import STATUS_PATH
from ..wire.refit_note import RefitNote
from ..wire.sendable import NamedTensor, sendable
from ..wire.stages import Mark
from ..wire.staging import StagingBuffers, default_bucket_bytes
from .connection import Connection

Progress = Callable[[int, int], None]


def is_ours(server_info: Mapping[str, Any]) -> bool:
    """Whether it is a server of this package, with the same way of sending."""
    first = (server_info.get("internal_states") or [None])[0]
    section = (first or {}).get("fp8rl") or {}
    return section.get("flat_layout") == layout_text.VERSION


# SGLang does not say by which method it serves where it found that in the checkpoint.
_SERVED_OTHERWISE = (
    "fp8rl: {} does not serve with fp8_blockwise_online, or by another version of it: SGLang copies what is sent. "
    "Weights in BF16 are right so; FP8 of SGLang's own methods keeps the scales of its checkpoint, and is wrong"
)


class TensorUpdate:
    """One refit of one server; `note` is what a server of this package is told of it.

    Attributes:
        is_ours: as the function; known within `session`.
        tensors, nbytes, buckets: that the server has answered for in `send`.
        bucket_bytes: a bucket ends before the tensor that would pass this size; known within `send`.
        device: of the first tensor, likewise.
        marks: when each stage began.
    """

    is_ours: bool
    bucket_bytes: int
    device: torch.device

    def __init__(self, connection: Connection, note: RefitNote) -> None:
        self._connection, self._note = connection, note
        self._is_flush_refused = False
        self.tensors = self.nbytes = self.buckets = 0
        self.marks: list[Mark] = []

    def mark(self, stage: str) -> None:
        """From now on the time is that stage's."""
        self.marks.append((stage, perf_counter()))

    @contextlib.contextmanager
    def session(self) -> Iterator[None]:
        """What is posted in here is one refit: a session where the server knows them, else by its name. Raises
        `RefitError` where it is refused, and for a server that SGLang does not update from tensors."""
        info = self._connection.server_info()
        _check_replicas(info)
        self._tp_size, self.is_ours = int(info["tp_size"]), is_ours(info)
        self._said = {"rid": self._note.to_text()} if self.is_ours else {}
        if not self.is_ours:
            self._connection.info = None  # it may be of ours by the next update
            # Of who called `RefitClient.update`, which is told once for each server.
            warnings.warn(_SERVED_OTHERWISE.format(self._connection.url), stacklevel=5)
        is_open = False
        try:
            is_open = self._connection.post_if_known("/begin_weight_update", self._said)
            if is_open:
                self._said = {}  # the session has it
            yield
        except BaseException:
            self._connection.forget()
            # The reason why it failed is worth more than a second failure to close.
            with contextlib.suppress(RefitError):
                self._close(is_open)
            raise
        self._close(is_open)

    def _close(self, is_open: bool) -> None:
        if is_open:
            self._connection.post("/end_weight_update", {})

    def send(
        self,
        named_tensors: Iterable[NamedTensor],
        bucket_bytes: int | None = None,
        on_bucket: Progress | None = None,
        on_filled: Callable[[Bucket], None] | None = None,
        expected: int = 0,
        *,
        before: Mapping[torch.device, int] | None = None,
    ) -> None:
        """Send all of them in a session, a bucket being made while the server has the one before; args as
        `RefitClient.update` and `buckets_of`. Raises `RefitError` where the server refuses, or there is nothing to send.

        Args:
            on_filled: called with each bucket while the server loads it.
            before: by device, see `default_bucket_bytes`.
        """
        self.mark("taking_tensors")
        listed = Listed.of(named_tensors)
        if listed is not None:
            self.device, buckets = listed.device, listed.buckets
        else:
            self.device, tensors = _begun(sendable(named_tensors))
            buckets = functools.partial(buckets_of, tensors, expected=expected)
        size = (before or {}).get(self.device, 0)
        self.bucket_bytes = bucket_bytes or default_bucket_bytes(self.device, size)

        def post(payload: Payload, is_last: bool) -> None:
            self.post(payload.texts, is_last)
            self.buckets += 1
            self.tensors, self.nbytes = self.tensors + payload.tensors, self.nbytes + payload.nbytes
            if on_bucket is not None:
                on_bucket(self.tensors, self.nbytes)

        self.mark("session")
        with self.session(), ThreadPoolExecutor(1) as poster:
            staging = StagingBuffers() if self.is_ours else None
            answer: Any = None
            self.mark("taking_tensors")
            for bucket, is_last in buckets(self.bucket_bytes, staging=staging):
                payload = bucket.payload(self._tp_size, self.is_ours)
                self.marks += bucket.marks
                self.mark("waiting")
                if answer is not None:
                    answer.result()
                answer = poster.submit(post, payload, is_last)
                if on_filled is not None:
                    self.mark("proving")
                    on_filled(bucket)
                self.mark("taking_tensors")
            self.mark("waiting")
            answer.result()
            self.mark("session")

    def post(self, texts: list[str], is_last: bool) -> None:
        """One bucket, in the session; the last one asks for the flush. Raises `RefitError` if it was refused;
        not if only the flush was, see `finish`."""
        body = {
            "serialized_named_tensors": texts,
            "load_format": "flattened_bucket",
            "flush_cache": is_last,
            **self._said,
        }
        try:
            self._connection.post("/update_weights_from_tensor", body)
        except NoAnswerError:
            raise
        except RefitError:
            self._is_flush_refused = is_last and self._is_only_flush_refused()
            if not self._is_flush_refused:
                raise

    def _is_only_flush_refused(self) -> bool:
        """SGLang answers alike where nothing was stored and where only its flush was refused."""
        if not self.is_ours:
            return False
        try:
            last = self._connection.get(STATUS_PATH).get("last_refit") or {}
        except RefitError:  # the refusal itself says more
            return False
        is_this = last.get("id") == self._note.id  # else this one never began
        return is_this and last["cache_flushed"] is False and last["outcome"] in ("open", "ok")

    def finish(self, flush_timeout: float) -> bool:
        """Behind the session: tell the version, and ask for the flush again if it was refused.
        Returns whether the cache is flushed; it waits `flush_timeout` seconds for running requests."""
        if self._note.version is not None:
            version = {"new_version": self._note.version, "abort_all_requests": False}
            self._connection.post("/update_weight_version", version)
        return not self._is_flush_refused or self._connection.flush_cache(flush_timeout)


def _begun(
    named_tensors: Iterator[NamedTensor],
) -> tuple[torch.device, Iterator[NamedTensor]]:
    """The device of the first one, and all of them; none is kept behind its bucket."""
    head = list(itertools.islice(named_tensors, 1))
    if not head:  # no session is opened for nothing
        rule = "it names at least one tensor"
        raise RefitError("an update", "an empty iterable", rule, "Check the source.")
    return head[0][1].device, itertools.chain(iter(head), named_tensors)


def _check_replicas(server_info: Mapping[str, Any]) -> None:  # SGLang answers HTTP 500 otherwise
    replicas = server_info.get("dp_size") or 1
    if replicas > 1 and not server_info.get("enable_dp_attention"):
        raise RefitError(
            "the server",
            f"{replicas} data-parallel replicas",
            "SGLang takes tensors for a server of one replica, or with DP attention",
            "Start a server for each replica (sglang_router balances them), or use "
            "--enable-dp-attention, or update_weights_from_disk.",
        )
