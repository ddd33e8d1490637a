"""The SGLang entry point: check the host, register; nothing else."""

from __future__ import annotations

import logging

logger = logging.getLogger(__name__)


def register() -> None:
    """Called by SGLang in every process (launcher, scheduler, detokenizer); idempotent.

    On a host this version does not support it registers nothing, and SGLang itself refuses
    `--quantization fp8_blockwise_online`; `sglang-fp8rl doctor` says why.
    """
    from .compat import check_host

    problems = check_host()
    if problems:
        logger.error("fp8rl registers nothing: %s", "; ".join(problems))
        return
    from .engine.host.hooks import register_method

    register_method()
