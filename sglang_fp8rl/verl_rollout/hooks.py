"""What of veRL and SGLang is replaced in veRL's processes, with its reason and when it can go.

veRL has registries for its rollout (`verl_plugin.py`) but none for these. Importing this imports no
host; a hook is applied in the process that needs it, when it needs it.
"""

from __future__ import annotations

import dataclasses
import importlib
from types import SimpleNamespace
from typing import Any

from ..compat import host_version
from ..declared_hooks import Hook, register_hooks
from ..errors import HostError

_ROLLOUT = "verl.workers.rollout.sglang_rollout"


def _fields_of_structs_too(original: Any) -> Any:
    """`dataclasses`, as far as the server's module uses it: its `fields` knows msgspec structs."""

    def fields(record: Any) -> tuple[Any, ...]:
        if dataclasses.is_dataclass(record):
            return original.fields(record)
        from msgspec.structs import fields as fields_of_struct

        return fields_of_struct(record)

    return SimpleNamespace(fields=fields)


def _with_sessions(original: Any) -> Any:
    """veRL's HTTP adapter with the two methods that SGLang's base class has since 0.5.21."""

    class AdapterWithSessions(original):
        async def begin_weight_update(self, selector: str = "all") -> dict[str, Any]:
            return await self._make_async_request("begin_weight_update", {"selector": selector})

        async def end_weight_update(self) -> dict[str, Any]:
            return await self._make_async_request("end_weight_update", {})

    return AdapterWithSessions


def scheduler_info_third(result: tuple[Any, ...], *_: Any, **__: Any) -> tuple[Any, ...]:
    """(managers, ports, schedulers, …) with the info of the first scheduler in place of the ports."""
    tokenizer_manager, template_manager, _ports, schedulers, *rest = result
    return (tokenizer_manager, template_manager, schedulers.scheduler_infos[0], schedulers, *rest)


SERVER_HOOKS = (
    Hook(
        f"{_ROLLOUT}.async_sglang_server.dataclasses",
        "WRAP",
        _fields_of_structs_too,
        "the server actor asks `dataclasses.fields(ServerArgs)`, a msgspec struct since SGLang "
        "0.5.20: no server would start",
        "veRL looks for fields of ServerArgs in another way",
    ),
    Hook(
        "sglang.srt.entrypoints.engine.Engine._launch_subprocesses",
        "AFTER",
        scheduler_info_third,
        "the server actor takes its third result for the scheduler's info; it is the ports since "
        "0.5.10, and `/server_info` would answer 500 for ever",
        "veRL takes the fourth",
    ),
)
ADAPTER_HOOKS = (
    Hook(
        f"{_ROLLOUT}.sglang_rollout.AsyncHttpServerAdapter",
        "WRAP",
        _with_sessions,
        "begin_weight_update and end_weight_update are abstract in SGLang's EngineBase since "
        "0.5.21: veRL's adapter could not even be created",
        "veRL's adapter has them",
    ),
)
VERL_HOOKS = (*SERVER_HOOKS, *ADAPTER_HOOKS)


def apply_hooks(hooks: tuple[Hook, ...]) -> None:
    """Put hooks in force in this process, once each. Raises `HostError` where a target of veRL is gone.

    Side effects on the host: SGLang's plugins are loaded (veRL builds `ServerArgs` before SGLang
    would load them, and 0.5.16 refuses a quantization method it does not know yet); the targets of
    `hooks` are replaced.
    """
    from sglang.srt.plugins import load_plugins
    from sglang.srt.plugins.hook_registry import HookRegistry

    load_plugins()
    register_hooks(hook for hook in hooks if hook.kind != "WRAP")
    HookRegistry.apply_hooks()
    for hook in hooks:
        if hook.kind == "WRAP":
            _wrap(hook)


def _wrap(hook: Hook) -> None:
    module_name, name = hook.target.rsplit(".", 1)
    module = importlib.import_module(module_name)
    current = getattr(module, name, None)
    if current is None:
        raise HostError(
            hook.target,
            "not there",
            f"this veRL can't be served with SGLang {host_version()}: {hook.reason}",
            "Install a tested version of veRL (docs/verl.md).",
        )
    if getattr(current, "fp8rl_hook", None) is not hook:
        replacement = hook.function(current)
        replacement.fp8rl_hook = hook
        setattr(module, name, replacement)
