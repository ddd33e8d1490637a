"""What every trainer process of veRL sends weights with: refits with a name, versions, flattened buckets.

What fails on one rank of a server fails on all of them, and none is left waiting.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar
from uuid import uuid4

import torch
import torch.distributed as dist
from sglang.srt.plugins import load_plugins
from sglang.srt.weight_sync.utils import _preprocess_tensor_for_update_weights
from torch.distributed.device_mesh import DeviceMesh
from verl.workers.rollout.sglang_rollout import sglang_rollout as verls
from verl.workers.rollout.utils import ensure_async_iterator

from ..client.connection import SERVER_INFO_PATH, Connection
from ..client.tensor_update import TensorUpdate, is_ours
from ..errors import RefitError
from ..wire.refit_note import ALL, PARTIAL, RefitNote
from ..wire.verl_deltas import WIRE_FORMAT, deltas_refused
from . import trains_what_is_served
from .buckets import flat_buckets, of_all_ranks

T = TypeVar("T")
logger = logging.getLogger(__name__)

EXTENT_KEY = "fp8rl_extent"
FLUSH_SECONDS = 30.0


class ServerAdapter(verls.ServerAdapter):
    """veRL's adapter, which lives in every rank of a trainer.

    - A refit is one weight-update session where SGLang has them (0.5.21 and newer), so a plain BF16 rollout can
      be updated there too. Where it has none, a server of this package reads the refit's name in each call.
    - Each bucket goes as one tensor, instead of every tensor pickled by itself; to a server of this package with
      a text layout.
    - The served weights carry the trainer's step as SGLang's `weight_version`.
    - An actor that trains what is served, and has another plan than the server, is refused at the first refit.

    LoRA adapters, deltas and disaggregation go veRL's own way, and so do buckets that veRL has to make.

    Side effects on the host: those of `prepare_rank`.
    """

    _engine: Any
    _is_plan_checked = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        prepare_rank()
        super().__init__(*args, **kwargs)

    async def update_weights(self, weights: Any, global_steps: Any = None, **kwargs: Any) -> None:
        """As veRL's: iterate `weights` on every rank, send them, flush the cache.

        Raises:
            RefitError: what any rank of the server's group met, on all of them: the server refused,
                does not answer, was not sent all that was announced, or has another plan than its actor.
        """
        by_verl = functools.partial(super().update_weights, weights, **kwargs)
        found = await outcome_of(self._init_server_adapter)
        if self._pd_role is not None or self.device_mesh is None:
            await by_verl(global_steps=global_steps)
            return
        is_delta = kwargs.get("wire_format") == WIRE_FORMAT
        try:
            self._group.share(found)
            # veRL gives its rollout the actor's configuration of the model.
            if not self._is_plan_checked and trains_what_is_served(self.model_config):
                await self._ask(self._check_plan)
                self._is_plan_checked = True
            if is_delta and await self._ask(
                lambda: is_ours(self._connection.get(SERVER_INFO_PATH))
            ):
                raise deltas_refused(f"wire_format {WIRE_FORMAT!r}")
            if is_delta or (kwargs.get("peft_config") and kwargs.get("base_sync_done")):
                await self._all_by_verl(by_verl)
                await self._tell_steps(global_steps)
            else:
                await self._refit(weights, global_steps, by_verl)
        except RefitError:
            await outcome_of(lambda: _drain(weights))
            raise

    async def _refit(
        self, weights: Any, global_steps: Any, by_verl: Callable[[], Awaitable[None]]
    ) -> None:
        version = None if global_steps is None else str(global_steps)
        note = RefitNote(uuid4().hex, version, self._extent)
        update: Any = TensorUpdate(self._connection, note) if self._group.leads else None
        with contextlib.ExitStack() as session:

            def begin() -> bool:
                session.enter_context(update.session())
                return update.is_ours

            layout_as_text = await self._ask(begin)
            if self._is_cut_by_verl:
                await self._all_by_verl(by_verl)
            else:
                await self._send(weights, update, layout_as_text)
            await self._ask(session.close)
        # Behind the session: an update that failed keeps its old version. veRL generates nothing meanwhile.
        await self._tell_steps(global_steps)
        if not await self._ask(lambda: update.finish(FLUSH_SECONDS)):
            logger.warning("fp8rl: the server runs requests, and its cache is not flushed")

    async def _send(self, weights: Any, update: Any, layout_as_text: bool) -> None:
        buckets = flat_buckets(weights, self._bucket_bytes, layout_as_text)
        is_last = False
        while not is_last:
            said = self._group.gather(await outcome_of(lambda: anext(buckets, None)))

            def post(said: list[Any] = said) -> bool:
                texts, is_last = of_all_ranks(said)
                update.post(texts, is_last)
                return is_last

            # The server has read every rank's memory when it answers; then it may go.
            is_last = await self._ask(post)

    async def _all_by_verl(self, update: Callable[[], Awaitable[None]]) -> None:
        """veRL's own way, on every rank. What the server refuses there is raised on the leading rank alone, while
        the others gather the next bucket with it; so it is kept until all of them are through."""
        refused: list[RefitError] = []
        if self._engine is not None:
            self._engine.refused = refused
        said = self._group.gather(await outcome_of(update))
        failed = (one for one in [*refused, *said] if isinstance(one, RefitError))
        self._group.share(next(failed, None))

    async def _tell_steps(self, global_steps: Any) -> None:
        if global_steps is not None:
            await self._group.by_leader(
                lambda: self.server_actor.set_global_steps.remote(global_steps)
            )

    def _check_plan(self) -> None:
        from .served_actor import check_plan  # veRL has imported it: importing it changes veRL

        check_plan(self._connection)

    @property
    def _is_cut_by_verl(self) -> bool:
        """Whether veRL quantizes, or knows which tensors may not be parted."""
        model_type = getattr(self.model_config.hf_config, "model_type", None)
        return self.config.get("quantization", None) is not None or model_type == "deepseek_v4"

    @property
    def _extent(self) -> str:
        """What a refit brings: all, unless the user's config declares the rest still right."""
        extent = (self.config.get("custom", None) or {}).get(EXTENT_KEY, ALL)
        if extent not in (ALL, PARTIAL):
            rule = f"a refit brings {ALL!r} parameters, or is {PARTIAL!r}"
            remedy = "Leave it out where the trainer sends all of its weights."
            raise RefitError(f"rollout.custom.{EXTENT_KEY}", repr(extent), rule, remedy)
        return extent

    async def _ask(self, request: Callable[[], T]) -> T:
        """What the leading rank's request to the server is answered; all ranks go on, or fail, together."""
        return await self._group.by_leader(lambda: asyncio.to_thread(request))

    @property
    def _group(self) -> RankGroup:
        return RankGroup(self.device_mesh["infer_tp"])

    @functools.cached_property
    def _connection(self) -> Connection:
        """Of the leading rank."""
        engine, server = self._engine, self._engine.server_args
        # As long as veRL would try, but once: a bucket that is sent again may be cast twice at a time.
        return Connection(
            f"http://{server.host}:{server.port}", engine.timeout * engine.max_attempts
        )

    @property
    def _bucket_bytes(self) -> int:
        return int(self.config.checkpoint_engine.update_weights_bucket_megabytes) << 20


def prepare_rank() -> None:
    """Have veRL's adapter ask its server in a way that every supported SGLang allows; idempotent.

    Side effects on the host: SGLang's plugins are loaded; a global name of veRL's adapter is replaced.
    """
    load_plugins()
    verls.AsyncHttpServerAdapter = HttpAdapter


class HttpAdapter(verls.AsyncHttpServerAdapter):
    """veRL's, with the two methods that SGLang's base class has since 0.5.21.

    Attributes:
        refused: where a list, the first refusal of a bucket goes there instead of being raised, and the buckets
            behind it are not sent.
    """

    refused: list[RefitError] | None = None

    async def update_weights_from_tensor(self, req: Any) -> Any:
        if self.refused is None:
            return await super().update_weights_from_tensor(req)
        if not self.refused:
            said = await outcome_of(functools.partial(super().update_weights_from_tensor, req))
            if isinstance(said, RefitError):
                self.refused.append(said)
        return {}

    async def begin_weight_update(self, selector: str = "all") -> dict[str, Any]:
        return await self._make_async_request("begin_weight_update", {"selector": selector})

    async def end_weight_update(self) -> dict[str, Any]:
        return await self._make_async_request("end_weight_update", {})


async def _drain(weights: Any) -> None:
    """To its end on a rank that failed too: the ranks of other servers gather these tensors with it."""
    async for _, tensor in ensure_async_iterator(weights):
        if isinstance(tensor, torch.Tensor):  # or a flush of deltas
            _preprocess_tensor_for_update_weights(tensor.detach())


class RankGroup:
    """The ranks of a mesh, the first of which leads: it talks to the server."""

    def __init__(self, mesh: DeviceMesh) -> None:
        self._mesh, self._first = mesh, mesh.mesh.tolist()[0]
        self.leads: bool = mesh.get_local_rank() == 0

    async def by_leader(self, ask: Callable[[], Awaitable[T]]) -> T:
        """What the leading rank was answered, on all ranks; whatever was raised there, as a `RefitError`."""
        return self.share(await outcome_of(ask) if self.leads else None)

    def share(self, outcome: Any) -> Any:
        """The leading rank's, on all ranks; raised if it is a `RefitError`."""
        values = [outcome]
        dist.broadcast_object_list(values, src=self._first, group=self._mesh.get_group())
        if isinstance(values[0], RefitError):
            raise values[0]
        return values[0]

    def gather(self, own: Any) -> list[Any]:
        """What every rank has, on the first; nothing on the others."""
        gathered: list[Any] | None = [None] * self._mesh.size() if self.leads else None
        dist.gather_object(own, gathered, dst=self._first, group=self._mesh.get_group())
        return gathered or []


async def outcome_of(ask: Callable[[], Awaitable[Any]]) -> Any:
    """What it returned; or the `RefitError` that says what it raised, for `RankGroup` to hand round."""
    try:
        return await ask()
    except RefitError as error:
        return error
    except Exception as error:  # raised on all ranks: one alone would leave the others waiting
        logger.warning("fp8rl: a refit fails on all ranks of its server", exc_info=True)
        rule = "what one rank of a server's group raises ends the refit on all of them"
        remedy = "The log of that rank has the traceback; send all weights again."
        return RefitError("a refit", f"{type(error).__name__}: {error}", rule, remedy)
