"""What the server's parallel layout means for updates: one is refused, one keeps experts unrecorded."""

from __future__ import annotations

from ...errors import ConfigError


def experts_may_move() -> bool:
    """Whether SGLang balances experts over ranks while serving."""
    from sglang.srt.runtime_context import get_server_args

    args = get_server_args()
    return bool(args.enable_eplb or args.elastic_ep_backend)


def check_layout() -> None:
    """Refuse pipeline parallelism, for this process's server.

    Only the first stage answers requests, and ranks compare what they found within one stage: what
    failed in another stage would be reported as served.

    Raises:
        ConfigError: the server has more than one stage.
    """
    from sglang.srt.runtime_context import get_parallel

    stages = get_parallel().pp_size
    if stages > 1:
        raise ConfigError(
            "--pp-size",
            str(stages),
            "an update that fails in a stage behind the first would be answered as a success: no other "
            "stage answers requests",
            "Start with --pp-size 1 and a larger --tp-size.",
        )
