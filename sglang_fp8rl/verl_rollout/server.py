"""veRL's server actor, so that it starts on every supported SGLang and answers `/server_info`."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import ray
from sglang.srt.entrypoints import http_server
from sglang.srt.plugins import load_plugins
from verl.workers.rollout.sglang_rollout import async_sglang_server as verls

from ..wire.verl_deltas import check_backend


class HttpServer(verls.SGLangHttpServer):
    """The actor that runs SGLang's launcher and HTTP server."""

    async def launch_server(self, *args: Any, **kwargs: Any) -> None:
        """As veRL's, in this one process that is prepared for it."""
        prepare_actor()
        await super().launch_server(*args, **kwargs)


class Replica(verls.SGLangReplica):
    """Starts `HttpServer` where veRL would start its own actor; not for a rollout of deltas."""

    def __init__(self, replica_rank: int, config: Any, *args: Any, **kwargs: Any) -> None:
        check_backend(config)
        super().__init__(replica_rank, config, *args, **kwargs)
        self.server_class = ray.remote(HttpServer)


def prepare_actor() -> None:
    """Have veRL's launcher start this SGLang; idempotent.

    Side effects on the host: SGLang's plugins are loaded (veRL builds `ServerArgs` before SGLang
    would load them, and 0.5.16 refuses a quantization method it does not know yet); two global names
    that the launcher looks up are replaced.
    """
    load_plugins()
    verls.dataclasses = SimpleNamespace(fields=fields_of)
    http_server.Engine = Engine


def fields_of(record: Any) -> tuple[Any, ...]:
    """`dataclasses.fields`, of `ServerArgs` too, which is a msgspec struct since SGLang 0.5.20."""
    if dataclasses.is_dataclass(record):
        return dataclasses.fields(record)
    from msgspec.structs import fields

    return fields(record)


class Engine(http_server.Engine):
    """SGLang's, of which veRL takes the third result of this method for the scheduler's info."""

    @classmethod
    def _launch_subprocesses(cls, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """Managers of tokens and templates, the first scheduler's info in place of the ports, schedulers, …"""
        tokens, templates, _ports, schedulers, *rest = super()._launch_subprocesses(*args, **kwargs)
        return (tokens, templates, schedulers.scheduler_infos[0], schedulers, *rest)
