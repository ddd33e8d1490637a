"""What every trainer process of veRL sends weights with: sessions, versions, flattened buckets."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from http import HTTPStatus
from typing import Any
from uuid import uuid4

import torch
from sglang.srt.weight_sync.utils import _preprocess_tensor_for_update_weights
from verl.workers.rollout.sglang_rollout import sglang_rollout as verls
from verl.workers.rollout.utils import ensure_async_iterator

from ..compat import SESSIONS_SINCE, host_version
from ..errors import RefitError
from ..wire import layout_text
from ..wire.plan import STATUS_PATH
from ..wire.refit_note import ALL, PARTIAL, RefitNote
from ..wire.verl_deltas import WIRE_FORMAT, deltas_refused
from .hooks import ADAPTER_HOOKS, apply_hooks
from .rank_group import FirstFailure, RankGroup, outcome_of
from .server_requests import FLATTENED, FlatBuckets, Server, is_the_end

EXTENT_KEY = "fp8rl_extent"


class ServerAdapter(verls.ServerAdapter):
    """veRL's adapter, which lives in every rank of a trainer.

    - A refit runs in a weight-update session where SGLang has them (0.5.21 and newer), so a plain
      BF16 rollout can be updated there too.
    - A server of this package gets each bucket as one tensor with a text layout, instead of every
      tensor pickled by itself.
    - The served weights carry the trainer's step as SGLang's `weight_version`.

    Side effects on the host, once per process: those of `apply_hooks(ADAPTER_HOOKS)`.
    """

    _engine: Any
    _is_ours: bool | None = None  # not asked yet

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        apply_hooks(ADAPTER_HOOKS)
        super().__init__(*args, **kwargs)

    async def update_weights(self, weights: Any, global_steps: Any = None, **kwargs: Any) -> None:
        """As veRL's: iterate `weights` on every rank, send them, flush the cache.

        Raises:
            RefitError: what any rank of the server's group met, on all of them: the server refused,
                does not answer, or was not sent all that was announced.
        """
        found = await outcome_of(self._init_server_adapter)
        if self._pd_role is not None or self.device_mesh is None:
            await _given(found)
            await super().update_weights(weights, global_steps=global_steps, **kwargs)
            return
        try:
            await self._group.by_leader(lambda: _given(found))
            if self._is_ours is None:
                self._is_ours = await self._group.by_leader(self._reads_layouts)
            if self._brings_whole_tensors(kwargs):
                await self._refit(weights, global_steps, kwargs)
            else:
                await self._send_verls_way(weights, kwargs)
                await self._set_steps(global_steps)
        except RefitError:
            await outcome_of(lambda: _drain(weights))
            raise

    async def _refit(self, weights: Any, global_steps: Any, kwargs: dict[str, Any]) -> None:
        note = RefitNote(
            uuid4().hex,
            None if global_steps is None else str(global_steps),
            wants_all=self._extent == ALL,
            is_partial=self._extent == PARTIAL,
        )
        async with self._session(note):
            if self._is_ours and not self._is_quantized_by_verl:
                await self._send_flat(weights)
                await self._group.by_leader(self._flush_cache)
            else:
                await self._send_verls_way(weights, kwargs)
        # After the session: an update that failed keeps its old version. veRL generates nothing meanwhile.
        await self._set_steps(global_steps)
        if global_steps is not None:
            version = {"new_version": str(global_steps), "abort_all_requests": False}
            await self._post("update_weight_version", version)

    def _brings_whole_tensors(self, kwargs: dict[str, Any]) -> bool:
        """Or a LoRA adapter; or deltas, which a server of this package can't take.

        Raises:
            RefitError: for deltas to such a server; alike on all ranks.
        """
        wire = kwargs.get("wire_format", "named_tensors")
        if self._is_ours and wire == WIRE_FORMAT:
            raise deltas_refused(f"wire_format {wire!r}")
        is_adapter = bool(kwargs.get("peft_config") and kwargs.get("base_sync_done"))
        return wire == "named_tensors" and not is_adapter

    @property
    def _is_quantized_by_verl(self) -> bool:
        """Or it knows which tensors may not be parted: its buckets are not ours to make."""
        model_type = getattr(self.model_config.hf_config, "model_type", None)
        return self.config.get("quantization", None) is not None or model_type == "deepseek_v4"

    @property
    def _extent(self) -> str:
        """What a refit brings: all, unless the user's config declares the rest still right."""
        extent = (self.config.get("custom", None) or {}).get(EXTENT_KEY, ALL)
        if extent not in (ALL, PARTIAL):
            raise RefitError(
                f"rollout.custom.{EXTENT_KEY}",
                repr(extent),
                f"a refit brings {ALL!r} parameters, or is {PARTIAL!r}",
                "Leave it out where the trainer sends all of its weights.",
            )
        return extent

    async def _reads_layouts(self) -> bool:
        """Whether the server is one of this package."""
        status = await self._server.get(STATUS_PATH[1:], or_not=HTTPStatus.NOT_FOUND)
        return status is not None and status.get("flat_layout") == layout_text.VERSION

    @contextlib.asynccontextmanager
    async def _session(self, note: RefitNote) -> AsyncIterator[None]:
        """Announces what comes; where SGLang has no sessions, looks whether it came."""
        version = host_version()
        if version is None or version < SESSIONS_SINCE:
            yield
            if self._is_ours and note.wants_all:
                await self._group.by_leader(self._check_all_came)
            return
        await self._post("begin_weight_update", {"rid": note.to_text()} if self._is_ours else None)
        try:
            yield
        except BaseException:
            # Why it failed is worth more than a second failure to close; the other ranks fail too.
            if self._leads:
                with contextlib.suppress(RefitError):
                    await self._server.post("end_weight_update")
            raise
        await self._post("end_weight_update")

    async def _check_all_came(self) -> None:
        status = await self._server.get(STATUS_PATH[1:], or_not=HTTPStatus.NOT_FOUND)
        last = status["last_refit"]
        if not last["complete"]:
            raise RefitError(
                "the refit",
                f"left out {last['missing']} parameter(s), such as {', '.join(last['missing_names'])}",
                "a refit brings all parameters",
                f"Send them all, or set rollout.custom.{EXTENT_KEY}={PARTIAL}.",
            )

    async def _send_flat(self, weights: Any) -> None:
        buckets = FlatBuckets(weights, self._bucket_bytes)
        is_through = False
        while not is_through:
            texts = self._group.gather(await outcome_of(buckets.next_text))
            # The server has read every rank's memory when it answers; then it may go.
            is_through = await self._group.by_leader(lambda: self._post_bucket(texts))  # noqa: B023

    async def _post_bucket(self, texts: list[Any]) -> bool:
        """One bucket, of all ranks; returns whether there was none any more."""
        if is_the_end(texts):
            return True
        body = {
            "serialized_named_tensors": texts,
            "load_format": FLATTENED,
            "flush_cache": False,
        }
        await self._server.post("update_weights_from_tensor", body)
        return False

    async def _send_verls_way(self, weights: Any, kwargs: dict[str, Any]) -> None:
        engine, kept = self._engine, FirstFailure(self._engine)
        self._engine = None if engine is None else kept
        own = await outcome_of(lambda: super(ServerAdapter, self).update_weights(weights, **kwargs))
        self._engine = engine
        await self._group.by_leader(lambda: _given(kept.error or own))
        await _given(own)

    async def _flush_cache(self) -> None:
        await self._engine.flush_cache()

    async def _set_steps(self, global_steps: Any) -> None:
        async def ask() -> None:
            await self.server_actor.set_global_steps.remote(global_steps)

        if global_steps is not None:
            await self._group.by_leader(ask)

    async def _post(self, endpoint: str, body: dict[str, Any] | None = None) -> Any:
        """One request by the leading rank; all ranks of its group go on, or fail, together."""
        return await self._group.by_leader(lambda: self._server.post(endpoint, body))

    @property
    def _group(self) -> RankGroup:
        return RankGroup(self.device_mesh["infer_tp"], self._leads)

    @property
    def _leads(self) -> bool:
        """Whether this rank talks to a server."""
        return self._is_server_tp_leader()

    @property
    def _server(self) -> Server:
        server = self._engine.server_args
        # As long as veRL would try, but once: a bucket that is sent again may be cast twice at a time.
        patience = self._engine.timeout * self._engine.max_attempts
        return Server(f"http://{server.host}:{server.port}", patience)

    @property
    def _bucket_bytes(self) -> int:
        return int(self.config.checkpoint_engine.update_weights_bucket_megabytes) << 20


async def _given(outcome: Any) -> None:
    """For all ranks, what this one has met already."""
    if isinstance(outcome, RefitError):
        raise outcome


async def _drain(weights: Any) -> None:
    """To its end on a rank that failed too: the ranks of other servers gather these tensors with it."""
    async for _, tensor in ensure_async_iterator(weights):
        if isinstance(tensor, torch.Tensor):  # or a flush of deltas
            _preprocess_tensor_for_update_weights(tensor.detach())
