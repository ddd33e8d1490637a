"""A small HTTP client: send weights to a running SGLang server in buckets. torch and requests only.

What a bucket looks like on the wire is `wire.py`'s business.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from http import HTTPStatus
from time import perf_counter
from typing import Any
from uuid import uuid4

import requests

from .errors import RefitError
from .pipelined_send import PipelinedSender, Progress, UpdateResult
from .wire import layout_text
from .wire.bucket import (
    NamedTensor,
    allocate,
    buckets_of,
    each_once,
    nbytes_of,
    payload_of,
)
from .wire.fingerprint import FINGERPRINT_PATH, Fingerprint, Verification, compare
from .wire.plan import PLAN_PATH, STATUS_PATH, RefitPlan
from .wire.refit_note import RefitNote
from .wire.staging import StagingBuffers

LOAD_FORMATS = ("flattened_bucket", None)


class RefitClient:
    """Updates, and asks, one server.

    Args:
        url: of the server, e.g. `http://127.0.0.1:30000`.
        timeout: seconds for one request.
        api_key: of `--api-key`, if the server was started with one: for plan, status, generation,
            and for updates too where there is no admin key.
        admin_api_key: of `--admin-api-key`: SGLang asks for it (and takes no other) at every
            endpoint that changes the server, updates and sessions among them.
    """

    def __init__(
        self,
        url: str,
        *,
        timeout: float = 600,
        api_key: str | None = None,
        admin_api_key: str | None = None,
    ) -> None:
        self.url = url.rstrip("/")
        self.timeout = timeout
        self._waited = 0.0
        self._is_flush_refused = False
        self._http = requests.Session()
        if api_key:
            self._http.headers["Authorization"] = f"Bearer {api_key}"
        key = admin_api_key or api_key
        self._admin = {"Authorization": f"Bearer {key}"} if key else {}

    def update(
        self,
        named_tensors: Iterable[NamedTensor],
        *,
        bucket_bytes: int = 512 << 20,
        load_format: str | None = "flattened_bucket",
        tp_size: int | None = None,
        on_bucket: Progress | None = None,
        plan: RefitPlan | None = None,
        verify: bool = False,
        weight_version: str | None = None,
        partial: bool = False,
        flush_timeout: float = 10,
    ) -> UpdateResult:
        """Send tensors, full and unsharded, under their checkpoint names; return when served.

        Opens a weight-update session where the server knows them (SGLang 0.5.21 and newer).

        Args:
            named_tensors: consumed lazily; two buckets of them are held at a time, the next one
                being made while the server casts the one before, in two buffers that take turns.
            bucket_bytes: a bucket ends before the tensor that would pass this size. A single
                larger tensor is a bucket of its own.
            load_format: "flattened_bucket" (one shared buffer a bucket), or None (one each).
            tp_size: ranks of the server; asked from it if None.
            on_bucket: called after each bucket with the tensors and bytes sent so far.
            plan: that `named_tensors` were quantized by; compared with the server's first.
            verify: prove afterwards that the server holds what was sent, byte for byte, wherever it
                lies. Each tensor is cast here too as it goes by.
            weight_version: what SGLang calls the new weights (`weight_version` in `/model_info` and
                in each answer's `meta_info`). Set when all of the update succeeded; before that,
                and after a failure, the old one stays.
            partial: what is not among `named_tensors` is declared still right (frozen layers,
                adapters). Otherwise the server refuses an update that leaves anything out.
            flush_timeout: seconds to wait for running requests, where they keep the server from
                flushing its cache behind the last bucket.

        Raises:
            RefitError: the server refused; the message is its own. What was sent before stays, and
                the status says so until all of an update came.
                Or `plan` is not the server's: nothing was sent. Or what is served differs (`verify`).
        """
        if load_format not in LOAD_FORMATS:
            raise RefitError("load_format", repr(load_format), f"one of {LOAD_FORMATS}", "")
        if plan is not None:
            self.check_plan(plan)
        numbers = None
        if verify:
            from .trainer.fingerprint import Fingerprinter

            numbers = Fingerprinter(plan or self.plan())
            named_tensors = numbers.watch(named_tensors)
        info = self.server_info()
        size = int(info["tp_size"]) if tp_size is None else tp_size
        section = _section(info)
        as_text = section.get("flat_layout") == layout_text.VERSION
        note = RefitNote(uuid4().hex, weight_version, wants_all=not partial, is_partial=partial)
        said = {"rid": note.to_text()} if "state" in section else {}
        self._is_flush_refused = False
        began, waited_before = perf_counter(), self._waited
        # Only a server of this package answers when it has read all of a bucket.
        staging = StagingBuffers(allocate) if as_text else None
        named_once = each_once(named_tensors)
        with (
            self._session(said) as in_session,
            PipelinedSender(self._post_bucket, on_bucket) as sender,
        ):
            for bucket, is_last in buckets_of(named_once, bucket_bytes):
                if staging is not None:
                    staging.least = 0 if is_last else bucket_bytes
                payload = payload_of(bucket, load_format, size, as_text, staging)
                body = {
                    "serialized_named_tensors": payload.texts,
                    "load_format": load_format,
                    "flush_cache": is_last,
                    **({} if in_session else said),
                }
                sender.send(body, payload, len(bucket), sum(nbytes_of(t) for _, t in bucket))
            sender.finish()
        if not sender.tensors:
            raise RefitError(
                "an update",
                "an empty iterable",
                "it names at least one tensor",
                "Check the source.",
            )
        if numbers is not None:
            sent = numbers.fingerprint("the trainer")
            compare(self.fingerprint(), sent, partial=True).check(f"what {self.url} serves")
        if weight_version is not None:
            version = {"new_version": weight_version, "abort_all_requests": False}
            self._post_admin("/update_weight_version", version)
        is_flushed = not self._is_flush_refused or self._flush(flush_timeout)
        seconds, waited = perf_counter() - began, self._waited - waited_before
        return UpdateResult(
            sender.tensors, sender.nbytes, sender.buckets, seconds, waited, is_flushed
        )

    def plan(self) -> RefitPlan:
        """The server's plan: how each tensor is stored, and how it may be sent.

        Raises:
            RefitError: the server can't be reached, or does not serve with this method.
        """
        return RefitPlan.from_dict(self._get_plan().json())

    def check_plan(self, plan: RefitPlan) -> None:
        """Ask the server whether `plan` is its own; only the digest goes over the wire.

        Raises:
            RefitError: it is not, with both digests; or as `plan`.
        """
        answer = self._get_plan(**{"If-None-Match": f'"{plan.digest}"'})
        if answer.status_code == HTTPStatus.NOT_MODIFIED:
            return
        model, sizes = plan.document["model"]["architecture"], dict(plan.parallel)
        theirs = answer.json()
        raise RefitError(
            f"plan {plan.digest}",
            f"made for {model} {sizes}; {self.url} serves {theirs['model']['architecture']} "
            f"{theirs['parallel']} with {theirs['digest']}",
            "tensors quantized by one server's plan are not what another one holds; nothing was "
            "sent",
            "Call fetch_plan(url) again and quantize with what it returns.",
        )

    def verify(
        self,
        named_tensors: Iterable[NamedTensor],
        *,
        plan: RefitPlan | None = None,
        partial: bool = False,
    ) -> Verification:
        """Compare what is served with these weights, byte for byte, without sending them.

        Args:
            named_tensors: as in `update`.
            plan: of the server; asked from it if None.
            partial: a name that is not among them is not missing.

        Raises:
            RefitError, QuantizationError: as `trainer.fingerprint_of`.
        """
        from .trainer.fingerprint import fingerprint_of

        expected = fingerprint_of(named_tensors, plan or self.plan())
        return compare(self.fingerprint(), expected, partial=partial)

    def fingerprint(self) -> Fingerprint:
        """`GET /fp8rl/fingerprint`: one number for each name, over all ranks.

        Raises:
            RefitError: the server can't be reached, does not serve with this method, or its weights'
                memory is released.
        """
        return Fingerprint.from_dict(
            self._get(FINGERPRINT_PATH, "the fingerprint").json(), self.url
        )

    def _get_plan(self, **headers: str) -> requests.Response:
        return self._get(PLAN_PATH, "the plan", **headers)

    def _get(self, path: str, what: str, **headers: str) -> requests.Response:
        try:
            answer = self._http.get(self.url + path, headers=headers, timeout=self.timeout)
        except requests.RequestException as error:
            raise RefitError(
                self.url,
                f"no answer: {error}",
                f"{what} comes from a running server",
                "Look whether it is up and the address is right.",
            ) from error
        if answer.ok:
            return answer
        raise RefitError(
            self.url + path,
            f"HTTP {answer.status_code}: {answer.text[:500]}",
            f"{what} is served by a server of fp8_blockwise_online",
            "Start it with --quantization fp8_blockwise_online and this version of sglang-fp8rl.",
        )

    def generate(
        self,
        input_ids: Sequence[int],
        max_new_tokens: int = 16,
        *,
        temperature: float = 0.0,
        logprob_start_len: int | None = 0,
    ) -> dict[str, Any]:
        """One `/generate` response with log-probabilities, as SGLang returns it."""
        body: dict[str, Any] = {
            "input_ids": list(input_ids),
            "sampling_params": {
                "max_new_tokens": max_new_tokens,
                "temperature": temperature,
                "ignore_eos": True,
            },
            "return_logprob": True,
        }
        if logprob_start_len is not None:
            body["logprob_start_len"] = logprob_start_len
        return self._post("/generate", body)

    def server_info(self) -> dict[str, Any]:
        """`GET /server_info`."""
        response = self._http.get(f"{self.url}/server_info", timeout=self.timeout)
        response.raise_for_status()
        return response.json()

    def status(self) -> dict[str, Any]:
        """`GET /fp8rl/status`: the section `fp8rl` of the server's first internal state.

        Raises:
            RefitError: the server was not started with `fp8_blockwise_online`.
        """
        response = self._http.get(self.url + STATUS_PATH, timeout=self.timeout)
        if response.status_code == HTTPStatus.NOT_FOUND:
            raise RefitError(
                self.url + STATUS_PATH,
                "HTTP 404",
                "the server runs without this quantization method",
                "Start it with --quantization fp8_blockwise_online.",
            )
        response.raise_for_status()
        return response.json()

    def close_session(self) -> None:
        """End a session that a client which is gone left open; what it sent stays.

        Raises:
            RefitError: there is none.
        """
        self._post_admin("/end_weight_update", {})

    def tp_size(self) -> int:
        return int(self.server_info()["tp_size"])

    @contextlib.contextmanager
    def _session(self, said: dict[str, str]) -> Iterator[bool]:
        """Whether the server knows sessions; then one is open in here.

        Args:
            said: what the server is told of the refit.
        """
        answer = self._post_admin("/begin_weight_update", said, or_not_found=True)
        has_sessions = answer is not None
        try:
            yield has_sessions
        except BaseException:
            # The reason why it failed is worth more than a second failure to close.
            if has_sessions:
                with contextlib.suppress(RefitError, requests.RequestException):
                    self._post_admin("/end_weight_update", {})
            raise
        if has_sessions:
            self._post_admin("/end_weight_update", {})

    def _post_bucket(self, body: dict[str, Any]) -> Any:
        try:
            return self._post_admin("/update_weights_from_tensor", body)
        except RefitError:
            # SGLang answers alike where nothing was stored and where only its flush was refused.
            last = (self.status() if body["flush_cache"] else {}).get("last_refit") or {}
            is_stored = last.get("cache_flushed") is False and last["outcome"] in ("open", "ok")
            if not is_stored:
                raise
            self._is_flush_refused = True

    def _flush(self, timeout: float) -> bool:
        """Ask for the flush again, once the running requests are done. Returns whether it was done."""
        answer = self._http.post(
            f"{self.url}/flush_cache",
            params={"timeout": timeout},
            headers=self._admin,
            timeout=timeout + self.timeout,
        )
        return answer.ok

    def _post_admin(self, path: str, body: dict[str, Any], *, or_not_found: bool = False) -> Any:
        return self._post(path, body, or_not_found=or_not_found, headers=self._admin)

    def _post(
        self,
        path: str,
        body: dict[str, Any],
        *,
        or_not_found: bool = False,
        headers: dict[str, str] | None = None,
    ) -> Any:
        began = perf_counter()
        response = self._http.post(
            self.url + path, json=body, headers=headers, timeout=self.timeout
        )
        self._waited += perf_counter() - began
        if or_not_found and response.status_code == HTTPStatus.UNAUTHORIZED and headers:
            # SGLang asks for the api key where it knows no such endpoint, before it says so.
            response = self._http.post(self.url + path, json=body, timeout=self.timeout)
        if or_not_found and response.status_code == HTTPStatus.NOT_FOUND:
            return None
        if response.status_code in (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN):
            raise RefitError(
                f"POST {path}",
                f"HTTP {response.status_code}",
                "the server takes a key that was not given or is another",
                "RefitClient(api_key=…, admin_api_key=…): SGLang wants the admin key for updates and "
                "sessions where it has one, the api key otherwise.",
            )
        is_json = "json" in response.headers.get("content-type", "")
        answer = response.json() if is_json else response.text
        refused = isinstance(answer, dict) and answer.get("success") is False
        if not response.ok or refused:
            text = answer.get("message", answer) if isinstance(answer, dict) else answer
            raise RefitError(
                f"POST {path}",
                f"HTTP {response.status_code}",
                f"the server answered: {text}",
                "`sglang-fp8rl doctor` and the server's log say more.",
            )
        return answer


def fetch_plan(url: str, *, timeout: float = 600, api_key: str | None = None) -> RefitPlan:
    """The plan of the server at `url`, as `RefitClient.plan`."""
    return RefitClient(url, timeout=timeout, api_key=api_key).plan()


def _section(server_info: dict[str, Any]) -> dict[str, Any]:
    """The section `fp8rl` of the first internal state; empty for another server."""
    return (server_info.get("internal_states") or [{}])[0].get("fp8rl") or {}
