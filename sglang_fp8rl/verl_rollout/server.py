"""veRL's server actor, so that it starts on every supported SGLang and answers `/server_info`."""

from __future__ import annotations

from typing import Any

import ray
from verl.workers.rollout.sglang_rollout.async_sglang_server import SGLangHttpServer, SGLangReplica

from ..wire.verl_deltas import check_backend
from .hooks import SERVER_HOOKS, apply_hooks


class HttpServer(SGLangHttpServer):
    """The actor that runs SGLang's launcher and HTTP server."""

    async def launch_server(self, *args: Any, **kwargs: Any) -> None:
        """As veRL's, with `SERVER_HOOKS` in force in this one process."""
        apply_hooks(SERVER_HOOKS)
        await super().launch_server(*args, **kwargs)


class Replica(SGLangReplica):
    """Starts `HttpServer` where veRL would start its own actor; not for a rollout of deltas."""

    def __init__(self, replica_rank: int, config: Any, *args: Any, **kwargs: Any) -> None:
        check_backend(config)
        super().__init__(replica_rank, config, *args, **kwargs)
        self.server_class = ray.remote(HttpServer)
