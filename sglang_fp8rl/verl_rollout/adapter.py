"""What every trainer process of veRL sends weights with: sessions, versions, flattened buckets."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from http import HTTPStatus
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from sglang.srt.weight_sync.utils import _preprocess_tensor_for_update_weights
from verl.utils.device import get_device_id
from verl.workers.rollout.sglang_rollout import sglang_rollout as verls

from ..compat import SESSIONS_SINCE, host_version
from ..errors import RefitError
from ..wire import layout_text
from ..wire.bucket import payload_of
from ..wire.plan import STATUS_PATH
from .hooks import ADAPTER_HOOKS, apply_hooks
from .server_requests import Server

T = TypeVar("T")
_FLATTENED = "flattened_bucket"


class ServerAdapter(verls.ServerAdapter):
    """veRL's adapter, which lives in every rank of a trainer.

    - A refit runs in a weight-update session where SGLang has them (0.5.21 and newer), so a plain
      BF16 rollout can be updated there too.
    - A server of this package gets each bucket as one tensor with a text layout, instead of every
      tensor pickled by itself.
    - The served weights carry the trainer's step as SGLang's `weight_version`.

    Side effects on the host, once per process: those of `apply_hooks(ADAPTER_HOOKS)`.
    """

    _is_ours: bool | None = None  # not asked yet

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        apply_hooks(ADAPTER_HOOKS)
        super().__init__(*args, **kwargs)

    async def update_weights(self, weights: Any, global_steps: Any = None, **kwargs: Any) -> None:
        """As veRL's: iterate `weights` on every rank, send them, flush the cache.

        Raises:
            RefitError: the server refused, or does not answer any more; on every rank of its group.
            aiohttp.ClientResponseError: as veRL's, where its own way of sending is used.
        """
        await self._init_server_adapter()
        if self._goes_verls_way(kwargs):
            await super().update_weights(weights, global_steps=global_steps, **kwargs)
            return
        async with self._session():
            if await self._takes_flat_buckets():
                await self._send_flat(weights)
                if self._leads:
                    await self._engine.flush_cache()
                    if global_steps is not None:
                        await self.server_actor.set_global_steps.remote(global_steps)
            else:
                await super().update_weights(weights, global_steps=global_steps, **kwargs)
        if global_steps is not None:
            # After the session: an update that failed keeps its old version. veRL generates
            # nothing meanwhile.
            version = {"new_version": str(global_steps), "abort_all_requests": False}
            await self._post("update_weight_version", version)

    def _goes_verls_way(self, kwargs: dict[str, Any]) -> bool:
        """Prefill/decode servers, ranks without one, deltas, and LoRA adapters."""
        is_adapter = bool(kwargs.get("peft_config") and kwargs.get("base_sync_done"))
        is_delta = kwargs.get("wire_format", "named_tensors") != "named_tensors"
        return is_adapter or is_delta or self._pd_role is not None or self.device_mesh is None

    async def _takes_flat_buckets(self) -> bool:
        """Whether buckets go as one tensor each; the same on all ranks of a server's group."""
        model_type = getattr(self.model_config.hf_config, "model_type", None)
        if self.config.get("quantization", None) is not None or model_type == "deepseek_v4":
            return False  # veRL quantizes; or knows which tensors may not be parted
        if self._is_ours is None:
            self._is_ours = await self._by_leader(self._reads_text_layouts)
        return self._is_ours

    async def _reads_text_layouts(self) -> bool:
        """Whether the server is one of this package."""
        status = await self._server.get(STATUS_PATH[1:], or_not=HTTPStatus.NOT_FOUND)
        return status is not None and status.get("flat_layout") == layout_text.VERSION

    @contextlib.asynccontextmanager
    async def _session(self) -> AsyncIterator[None]:
        version = host_version()
        if version is None or version < SESSIONS_SINCE:
            yield
            return
        await self._post("begin_weight_update")
        try:
            yield
        except BaseException:
            # Why it failed is worth more than a second failure to close; the other ranks fail too.
            if self._leads:
                with contextlib.suppress(RefitError):
                    await self._server.post("end_weight_update")
            raise
        await self._post("end_weight_update")

    async def _send_flat(self, weights: Any) -> None:
        from sglang.srt.utils.patch_torch import monkey_patch_torch_reductions

        # What SGLang does before it pickles: handles of CUDA memory name the GPU, not its number.
        monkey_patch_torch_reductions()
        async for bucket in verls.get_named_tensor_buckets(weights, self._bucket_bytes):
            named = [(_plain_name(name), _local(tensor)) for name, tensor in bucket]
            payload = payload_of(named, _FLATTENED, ranks=1, layout_as_text=True)
            body = {
                "serialized_named_tensors": self._gather(payload.texts[0]),
                "load_format": _FLATTENED,
                "flush_cache": False,
            }
            # The server has read every rank's memory when it answers; then it may go.
            await self._post("update_weights_from_tensor", body)

    @property
    def _leads(self) -> bool:
        """Whether this rank talks to a server."""
        return self._engine is not None and self._is_server_tp_leader()

    @property
    def _server(self) -> Server:
        server = self._engine.server_args
        # As long as veRL would try, but once: a bucket that is sent again may be cast twice at a time.
        patience = self._engine.timeout * self._engine.max_attempts
        return Server(f"http://{server.host}:{server.port}", patience)

    @property
    def _bucket_bytes(self) -> int:
        return int(self.config.checkpoint_engine.update_weights_bucket_megabytes) << 20

    async def _post(self, endpoint: str, body: dict[str, Any] | None = None) -> Any:
        """One request by the leading rank; all ranks of its group go on, or fail, together."""
        return await self._by_leader(lambda: self._server.post(endpoint, body))

    async def _by_leader(self, ask: Callable[[], Awaitable[T]]) -> T:
        """What the leading rank was answered, on all ranks of its group; or what it was refused.

        Raises:
            RefitError: as `ask` raised it on the leading rank.
        """
        outcome: Any = None
        if self._leads:
            try:
                outcome = await ask()
            except RefitError as error:
                outcome = error
        outcome = self._agree(outcome)
        if isinstance(outcome, RefitError):
            raise outcome
        return outcome

    def _gather(self, payload: str) -> list[Any]:
        """All ranks' payloads, on the rank that leads."""
        mesh = self.device_mesh["infer_tp"]
        if mesh.size() == 1:
            return [payload]
        gathered: list[Any] | None = [None] * mesh.size() if mesh.get_local_rank() == 0 else None
        dist.gather_object(payload, gathered, dst=mesh.mesh.tolist()[0], group=mesh.get_group())
        return gathered or []

    def _agree(self, value: Any) -> Any:
        """The leading rank's value, on all ranks of its group."""
        mesh = self.device_mesh["infer_tp"]
        if mesh.size() == 1:
            return value
        values = [value]
        dist.broadcast_object_list(values, src=mesh.mesh.tolist()[0], group=mesh.get_group())
        return values[0]


def _plain_name(name: str) -> str:
    """veRL wraps layers under LoRA; the server knows no `base_layer`."""
    return name.replace(".base_layer.", ".")


def _local(tensor: torch.Tensor) -> torch.Tensor:
    """On the device whose memory the server can read, as veRL sends it."""
    full = _preprocess_tensor_for_update_weights(tensor.detach())
    return full.to(get_device_id()) if full.device.type == "cpu" else full
