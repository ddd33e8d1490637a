"""The veRL entry point: make the method known where veRL builds `ServerArgs` itself."""

from __future__ import annotations

import logging
from importlib.util import find_spec

logger = logging.getLogger(__name__)


def register() -> None:
    """Called by `import verl`, in every process that does; idempotent.

    veRL builds SGLang's `ServerArgs` in a process that never calls `load_plugins()`, and 0.5.16
    then refuses a quantization method it does not know. Running SGLang's own plugin loader here
    registers ours as everywhere else.
    """
    if find_spec("sglang") is None:
        return
    from sglang.srt.plugins import load_plugins

    load_plugins()
