"""Imported once by the fork server, so that no host pays for it again."""

from sglang.srt.models.registry import ModelRegistry

import sglang_fp8rl.engine.hooks  # noqa: F401
from sglang_fp8rl.numerics import warmup

ModelRegistry.get_supported_archs()
warmup()
