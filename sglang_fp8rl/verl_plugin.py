"""The veRL entry point: make the method known where veRL builds `ServerArgs` itself.

`import verl` imports this module, in every process that does, and calls nothing in it (veRL 0.9.1:
`entry_point.load()`), so importing it is what registers.
"""

from __future__ import annotations

import logging
from importlib.util import find_spec

from .compat import SESSIONS_SINCE, host_version
from .config import QUANTIZATION_METHOD
from .declared_hooks import Hook
from .host_symbols import find

logger = logging.getLogger(__name__)


def _make_optional(owner: type, name: str) -> None:
    """Subclasses of `owner` need not have the method any more."""
    owner.__abstractmethods__ = owner.__abstractmethods__ - {name}  # type: ignore[attr-defined]


VERL_HOOKS = tuple(
    Hook(
        f"sglang.srt.entrypoints.EngineBase.EngineBase.{name}",
        "OPTIONAL",
        _make_optional,
        "veRL 0.9.1's HTTP adapter is an `EngineBase` and knows no sessions, so it could not be "
        "created; its updates are served without them",
        "veRL has sessions",
        since=SESSIONS_SINCE,
    )
    for name in ("begin_weight_update", "end_weight_update")
)


def register() -> None:
    """Run SGLang's own plugin loader, which registers ours as everywhere else; idempotent.

    veRL builds SGLang's `ServerArgs` in a process that never calls `load_plugins()`, and SGLang then
    refuses a quantization method it does not know.

    Side effects on the host: two methods of `EngineBase` are no longer required of subclasses.
    """
    if find_spec("sglang") is None:
        return
    from sglang.srt.plugins import load_plugins

    load_plugins()
    from sglang.srt.layers.quantization import QUANTIZATION_METHODS

    if QUANTIZATION_METHOD not in QUANTIZATION_METHODS:
        return
    for hook in VERL_HOOKS:
        if hook.is_for(host_version()):
            _apply(hook)


def _apply(hook: Hook) -> None:
    owner_path, _, name = hook.target.rpartition(".")
    owner = find(owner_path)
    if not hasattr(owner, name):
        # veRL swallows what a plugin raises, so this line is all that a reader would get.
        logger.error(
            "fp8rl: %s is gone from SGLang %s: %s", hook.target, host_version(), hook.reason
        )
        return
    hook.function(owner, name)


register()
