"""The veRL entry point: make the method known where veRL builds `ServerArgs` itself.

`import verl` imports this module, in every process that does, and calls nothing in it (veRL 0.9.1:
`entry_point.load()`), so importing it is what registers.
"""

from __future__ import annotations

from importlib.util import find_spec

_SESSION_METHODS = frozenset({"begin_weight_update", "end_weight_update"})


def register() -> None:
    """Run SGLang's own plugin loader, which registers ours as everywhere else; idempotent.

    veRL builds SGLang's `ServerArgs` in a process that never calls `load_plugins()`, and SGLang then
    refuses a quantization method it does not know.
    """
    if find_spec("sglang") is None:
        return
    from sglang.srt.plugins import load_plugins

    load_plugins()
    if "fp8_blockwise_online" in _known_methods():
        _allow_engines_without_sessions()


def _known_methods() -> dict:
    from sglang.srt.layers.quantization import QUANTIZATION_METHODS

    return QUANTIZATION_METHODS


def _allow_engines_without_sessions() -> None:
    """veRL 0.9.1's HTTP adapter is an `EngineBase` and knows no sessions. Where SGLang has them
    (0.5.21 and newer) their methods are abstract, so the adapter could not even be created; the
    updates it sends are served without them (`hooks._update_hook`).

    *Side effect on the host*: two methods of `EngineBase` are no longer required of subclasses.
    Until veRL has them.
    """
    from sglang.srt.entrypoints.EngineBase import EngineBase

    EngineBase.__abstractmethods__ = EngineBase.__abstractmethods__ - _SESSION_METHODS


register()
