"""The veRL entry point: make the method known where veRL builds `ServerArgs` itself.

`import verl` imports this module, in every process that does, and calls nothing in it (veRL 0.9.1:
`entry_point.load()`), so importing it is what registers.
"""

from __future__ import annotations

from importlib.util import find_spec


def register() -> None:
    """Run SGLang's own plugin loader, which registers ours as everywhere else; idempotent.

    veRL builds SGLang's `ServerArgs` in a process that never calls `load_plugins()`, and SGLang then
    refuses a quantization method it does not know.
    """
    if find_spec("sglang") is None:
        return
    from sglang.srt.plugins import load_plugins

    load_plugins()


register()
