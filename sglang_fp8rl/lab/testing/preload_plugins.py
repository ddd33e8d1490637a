"""As `preload`, with SGLang's plugins loaded: it looks through every module for each hook, a second in all."""

import gc

from sglang.srt.plugins import load_plugins

from . import preload  # noqa: F401

load_plugins()
gc.freeze()
