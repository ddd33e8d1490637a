"""What a hook on the host is, how SGLang gets it, and whether it is in force.

SGLang's `HookRegistry` logs a hook that it could not apply and goes on. Weights would then load
through loaders that nobody wrapped, so this package looks before anything is built:
`check_hooks_in_force()` refuses to serve and names the symbol that is gone.

Importing this imports no host.
"""

from __future__ import annotations

import inspect
import pkgutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal

from .compat import host_named
from .errors import HostError


@dataclass(frozen=True)
class Hook:
    """One hook.

    Attributes:
        target: dotted path of a function, method or class of the host.
        kind: as SGLang's `HookType`.
        reason, until: why it is needed, and what has to happen for it to go.
    """

    target: str
    kind: Literal["BEFORE", "AFTER", "AROUND", "REPLACE"]
    function: Callable[..., Any]
    reason: str
    until: str


# What this process gave to SGLang's registry, in order.
_registered: list[Hook] = []


def register_hooks(hooks: Iterable[Hook]) -> None:
    """Hand hooks to SGLang's registry; `load_plugins()` applies them. Idempotent."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    for hook in hooks:
        if hook not in _registered:
            HookRegistry.register(hook.target, hook.function, HookType[hook.kind])
            _registered.append(hook)


def targets_not_hooked() -> dict[str, Hook]:
    """Targets of registered hooks whose calls would not meet them; of a class, the methods that are gone.

    Looked up where SGLang calls it, not in the registry's own notes: a target that was replaced
    after it was hooked counts as missing too.
    """
    return {target: hook for hook in _registered for target in _not_met(hook)}


def check_hooks_in_force() -> None:
    """Every registered hook is applied, or this method serves nothing: raises `HostError`, which names the targets
    that are gone."""
    missing = targets_not_hooked()
    if missing:
        reason = next(iter(missing.values())).reason
        raise HostError(
            ", ".join(missing),
            f"not hooked in {host_named()}",
            f"without it weights could be served that were never quantized ({reason})",
            "SGLang's log says why ('Failed to apply hooks'); `sglang-fp8rl doctor` lists all such "
            "symbols. Install a tested version of SGLang.",
        )


def find(path: str) -> object:
    """What the dotted path leads to, or None. Imports what is on the way."""
    try:
        return pkgutil.resolve_name(path)
    except (ImportError, AttributeError):
        return None


def _not_met(hook: Hook) -> list[str]:
    found: Any = find(hook.target)
    ours: Any = hook.function
    if isinstance(ours, type):  # a class in place of SGLang's, which has all that it overrides
        if not (isinstance(found, type) and issubclass(found, ours)):
            return [hook.target]
        methods = [name for name, value in vars(ours).items() if inspect.isfunction(value)]
        return [f"{hook.target}.{name}" for name in methods if not hasattr(ours.__mro__[1], name)]
    # SGLang wraps once per hook, and each wrapper holds its hook in its closure.
    while inspect.isfunction(found):
        if any(value is ours for value in inspect.getclosurevars(found).nonlocals.values()):
            return []
        found = getattr(found, "__wrapped__", None)
    return [hook.target]
