"""The public face of one server: update it, and ask it what it serves."""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import traceback
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Integral
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import torch

from ..errors import NoAnswerError, RefitError
from ..wire.bucket import ALIGNMENT
from ..wire.fingerprint import FINGERPRINT_PATH, Fingerprint, Verification, compare
from ..wire.plan import PLAN_PATH, STATUS_PATH, RefitPlan
from ..wire.refit_note import ALL, PARTIAL, RefitNote
from ..wire.sendable import NamedTensor
from ..wire.stages import seconds_by_stage
from .connection import SERVER_INFO_PATH, Connection
from .tensor_update import Progress, TensorUpdate

if TYPE_CHECKING:
    from ..trainer.bucket_numbers import BucketNumbers

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class UpdateResult:
    """What one `update` sent.

    Attributes:
        seconds: wall time, making the tensors included.
        server_seconds: of it, waiting for the server's answers.
        cache_flushed: whether the server let go of what the old weights had computed. False where
            requests kept it busy: the weights are stored, and `/flush_cache` is still to be called.
        unproven: names that `verify` could not compare, each with the reason; empty without it.
        bucket_bytes: the size that buckets were cut by.
        stages: where the `seconds` went: `taking_tensors` (from the iterable), `session` (asking the server what it
            can do, opening and closing), `filling` a bucket, `making_handles`, `waiting` for answers
            with the next bucket at hand, `proving`, and `finishing` (version, flush).
    """

    tensors: int
    nbytes: int
    buckets: int
    seconds: float
    server_seconds: float
    cache_flushed: bool = True
    unproven: Mapping[str, str] = field(default_factory=dict)
    bucket_bytes: int = 0
    stages: Mapping[str, float] = field(default_factory=dict)


class RefitClient:
    """Updates, and asks, one server. Every method raises `NoAnswerError` where it does not answer, and
    `RefitError` where it refuses, or does not serve with this method; `update` without `verify` only warns of that.

    Args:
        url: of the server, e.g. `http://127.0.0.1:30000`.
        timeout: seconds that the server may be silent in a request.
        api_key: of `--api-key`: for plan, status, generation, and all else where there is no admin key.
        admin_api_key: of `--admin-api-key`, which SGLang wants at every endpoint that changes the server
            (updates, sessions) and at the fingerprint.
    """

    _proof: BucketNumbers | None = None  # of the last update that proved itself
    _expected = 0  # bytes of a whole update, as the last one was

    def __init__(
        self,
        url: str,
        *,
        timeout: float = 600,
        api_key: str | None = None,
        admin_api_key: str | None = None,
    ) -> None:
        self._connection = Connection(url, timeout, api_key, admin_api_key)
        self.url = self._connection.url
        # Of the last whole update from there that left it to the client.
        self._bucket_bytes: dict[torch.device, int] = {}

    def update(
        self,
        named_tensors: Iterable[NamedTensor],
        *,
        bucket_bytes: int | None = None,
        on_bucket: Progress | None = None,
        plan: RefitPlan | None = None,
        verify: bool = False,
        weight_version: str | None = None,
        partial: bool = False,
        flush_timeout: float = 10,
    ) -> UpdateResult:
        """Send tensors, full and unsharded, under their checkpoint names; return when served.

        Args:
            named_tensors: consumed lazily, and each read as it goes by: its memory may be used for the next. Those of a
                list, tuple or dict are read bucket by bucket: they keep their memory and values until this returns.
            bucket_bytes: a bucket ends before the tensor that would pass this size; by default as before, or an
                eighth of the memory that is free where the first tensor lies (`/dev/shm` for one on the CPU), a power of
                two up to 2 GiB.
            on_bucket: called after each bucket with the tensors and bytes sent so far.
            plan: that `named_tensors` were quantized by; compared with the server's first.
            verify: prove afterwards that the server holds what was sent, byte for byte. Each bucket is cast here
                too while the server loads it, into up to 256 MiB on its device that stay with this client.
            weight_version: what SGLang calls the new weights (`weight_version` in `/model_info` and
                in each answer's `meta_info`), once all of the update succeeded.
            partial: what is not among `named_tensors` is declared still right (frozen layers,
                adapters). Otherwise the server refuses an update that leaves anything out.
            flush_timeout: seconds that the flush of the cache waits for running requests.

        Raises:
            RefitError: the server refused, in its own words; what was sent before stays. Or `plan` is
                not the server's: nothing was sent. Or what is served differs (`verify`).
            QuantizationError: NaN or Inf (`verify`); what was sent before stays.
        """
        _check_sizes(bucket_bytes, flush_timeout)
        if plan is not None:
            self.check_plan(plan)
        numbers = on_filled = None
        if verify:
            from ..trainer.fingerprint import Fingerprinter

            proof = self._take_proof(plan)
            numbers = Fingerprinter(proof.plan)
            on_filled = functools.partial(proof.add, numbers)
        note = RefitNote(uuid4().hex, weight_version, PARTIAL if partial else ALL)
        refit = TensorUpdate(self._connection, note)
        waited_before = self._connection.seconds_waited
        nbytes = 0 if partial else self._expected
        try:
            refit.send(
                named_tensors,
                bucket_bytes,
                on_bucket,
                on_filled,
                nbytes,
                before=self._bucket_bytes,
            )
        except BaseException as error:
            _let_go(error)
            raise
        if not partial:
            self._expected = refit.nbytes + ALIGNMENT * refit.tensors
            if not bucket_bytes:
                self._bucket_bytes[refit.device] = refit.bucket_bytes
        if torch.cuda.is_initialized():
            torch.cuda.ipc_collect()  # the server has let go of the buffers
        refit.mark("proving")
        unproven: Mapping[str, str] = {}
        if numbers is not None:
            expected = numbers.fingerprint("the trainer")
            found = compare(self.fingerprint(), expected, partial=True)
            if expected.numbers or found.differing:  # else there is nothing to compare
                found.check(f"what {self.url} serves")
            unproven, self._proof = found.unproven, proof
        refit.mark("finishing")
        is_flushed = refit.finish(flush_timeout)
        refit.mark("answered")
        result = UpdateResult(
            refit.tensors,
            refit.nbytes,
            refit.buckets,
            refit.marks[-1][1] - refit.marks[0][1],
            self._connection.seconds_waited - waited_before,
            is_flushed,
            unproven,
            refit.bucket_bytes,
            seconds_by_stage(refit.marks),
        )
        logger.debug("fp8rl: %s was updated: %s", self.url, result)
        return result

    def _take_proof(self, plan: RefitPlan | None) -> BucketNumbers:
        """For one update alone: that of the last one, if its plan is this one, or the server's still."""
        from ..trainer.bucket_numbers import BucketNumbers

        # In one step, before any request: of two threads one has it.
        kept = vars(self).pop("_proof", None)
        if plan is None and kept is not None:
            plan = self._connection.plan_unless(kept.plan.digest) or kept.plan
        plan = plan or self.plan()
        return kept if kept is not None and kept.plan.digest == plan.digest else BucketNumbers(plan)

    def __getstate__(self) -> dict[str, Any]:
        """A copy has a proof of its own, for tables hold addresses, and may be elsewhere."""
        return self.__dict__ | {"_proof": None, "_bucket_bytes": {}}

    def plan(self) -> RefitPlan:
        """The server's plan: how each tensor is stored, and how it may be sent."""
        return RefitPlan.from_dict(self._connection.get(PLAN_PATH))

    def check_plan(self, plan: RefitPlan) -> None:
        """Ask the server whether `plan` is its own; only the digest goes over the wire. Raises `RefitError` with both
        digests if it is not."""
        found = self._connection.plan_unless(plan.digest)
        if found is None:
            return
        theirs = found.document
        model, sizes = plan.document["model"]["architecture"], plan.document["parallel"]
        raise RefitError(
            f"plan {plan.digest}",
            f"made for {model} {sizes}; {self.url} serves {theirs['model']['architecture']} "
            f"{theirs['parallel']} with {theirs['digest']}",
            "tensors quantized by one server's plan are not what another one holds; nothing was sent",
            "Call fetch_plan(url) again and quantize with what it returns.",
        )

    def verify(
        self,
        named_tensors: Iterable[NamedTensor],
        *,
        plan: RefitPlan | None = None,
        partial: bool = False,
    ) -> Verification:
        """Compare what is served with these weights, byte for byte, without sending them. Raises as
        `trainer.fingerprint_of`.

        Args:
            plan: of the server; asked from it if None.
            partial: a name that is not among them is not missing.
        """
        from ..trainer.fingerprint import fingerprint_of

        expected = fingerprint_of(named_tensors, plan or self.plan())
        return compare(self.fingerprint(), expected, partial=partial)

    def fingerprint(self) -> Fingerprint:
        """`GET /fp8rl/fingerprint`: one number for each name, over all ranks. Refused while the weights' memory
        is released."""
        return Fingerprint.from_dict(self._connection.get(FINGERPRINT_PATH), self.url)

    def generate(
        self,
        input_ids: Sequence[int],
        max_new_tokens: int = 16,
        *,
        temperature: float = 0.0,
        logprob_start_len: int | None = 0,
    ) -> dict[str, Any]:
        """One `/generate` response with log-probabilities, as SGLang returns it."""
        sampling = {
            "max_new_tokens": max_new_tokens,
            "temperature": temperature,
            "ignore_eos": True,
        }
        body = {"input_ids": list(input_ids), "sampling_params": sampling, "return_logprob": True}
        start = {} if logprob_start_len is None else {"logprob_start_len": logprob_start_len}
        return self._connection.post("/generate", body | start)

    def server_info(self) -> dict[str, Any]:
        """`GET /server_info`."""
        return self._connection.get(SERVER_INFO_PATH)

    def status(self) -> dict[str, Any]:
        """`GET /fp8rl/status`: of a server's data-parallel replicas, that of the worst."""
        return self._connection.get(STATUS_PATH)

    def close_session(self) -> None:
        """End a session that a client which is gone left open; what it sent stays. What that refit lacked is in the
        status; raises `RefitError` where the session is still open."""
        try:
            self._connection.post("/end_weight_update", {})
        except NoAnswerError:
            raise
        except RefitError:
            problems = self.status().get("problems")
            if problems is None or any("session is open" in problem for problem in problems):
                raise


def _let_go(error: BaseException) -> None:
    """Who keeps an error keeps its frames: not this package's, which hold buckets."""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        if frame.f_globals.get("__name__", "").startswith(f"{__package__.partition('.')[0]}."):
            with contextlib.suppress(RuntimeError):  # it still runs
                frame.clear()


def _check_sizes(bucket_bytes: Any, flush_timeout: Any) -> None:
    """Raises `RefitError` for what would fail in the middle of an update, or behind it."""
    is_size = isinstance(bucket_bytes, Integral) and not isinstance(bucket_bytes, bool)
    if bucket_bytes is not None and not (is_size and bucket_bytes > 0):
        rule = "a bucket has a whole number of bytes, more than 0"
        raise RefitError("bucket_bytes", repr(bucket_bytes), rule, "Give e.g. 512 << 20, or None.")
    if not (isinstance(flush_timeout, (int, float)) and 0 <= flush_timeout < math.inf):
        rule = "the flush waits for so many seconds, 0 or more"
        raise RefitError("flush_timeout", repr(flush_timeout), rule, "Give a number, e.g. 10.")


def fetch_plan(url: str, *, timeout: float = 600, api_key: str | None = None) -> RefitPlan:
    """The plan of the server at `url`, as `RefitClient.plan`."""
    return RefitClient(url, timeout=timeout, api_key=api_key).plan()
