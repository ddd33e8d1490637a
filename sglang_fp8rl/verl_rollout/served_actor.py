"""veRL's FSDP actor trains what is served: `actor_rollout_ref.model.external_lib` names this module.

veRL imports it in every worker that has this model, before the model is built. The reference policy, which
only runs forward, and models that do not name it (a critic) stay as they are.
"""

from __future__ import annotations

import functools
import json
import logging
import os
from pathlib import Path
from typing import Any

from ..client.connection import Connection
from ..errors import ConfigError, RefitError
from ..trainer.served_weights import compute_as_served
from ..wire.plan import RefitPlan
from . import trains_what_is_served

logger = logging.getLogger(__name__)

PLAN_FILE = "SGLANG_FP8RL_SERVED_PLAN"


def install() -> None:
    """Have veRL's FSDP engine swap an actor that it has built.

    Side effects on the host: `FSDPEngine._build_model_optimizer` is wrapped.
    """
    from verl.workers.engine.fsdp.transformer_impl import FSDPEngine

    build = FSDPEngine._build_model_optimizer

    @functools.wraps(build)
    def build_and_swap(engine: Any) -> None:
        build(engine)
        is_actor = not engine.engine_config.forward_only
        if is_actor and trains_what_is_served(engine.model_config):
            swapped = compute_as_served(engine.module, plan_of_the_run())
            logger.info("fp8rl: %d modules of the actor compute as served", len(swapped))

    FSDPEngine._build_model_optimizer = build_and_swap


def plan_of_the_run() -> RefitPlan:
    """The plan of the servers that will be started: they are not there when an actor is built. Raises `ConfigError`
    where no file has it."""
    path = Path(os.environ.get(PLAN_FILE, ""))
    if not path.is_file():
        raise ConfigError(
            PLAN_FILE,
            repr(os.environ.get(PLAN_FILE)),
            "an actor that trains what is served needs the plan of its rollout servers, as a file",
            "Write it with `sglang-fp8rl plan MODEL --tp N --dtype bfloat16 --json > FILE`, and set it for all "
            "workers.",
        )
    try:
        document = json.loads(path.read_text())
    except ValueError as error:
        raise ConfigError(
            PLAN_FILE,
            str(path),
            f"it is the JSON that `sglang-fp8rl plan MODEL --json` prints ({error})",
            "Write it again; where that command fails its file stays empty.",
        ) from error
    return RefitPlan.from_dict(document)


def check_plan(connection: Connection) -> None:
    """Raise `RefitError` where the server has another plan than the actor trains with."""
    ours = plan_of_the_run()
    if found := connection.plan_unless(ours.digest):
        theirs = found.document
        other = [key for key in theirs if theirs[key] != ours.document.get(key) and key != "digest"]
        raise RefitError(
            f"{PLAN_FILE} {os.environ[PLAN_FILE]}",
            f"the plan {ours.digest}; {connection.url} has {theirs['digest']}, with other {', '.join(other)}",
            "an actor that trains what is served has the plan of its rollout servers",
            "Write it again with what they are started with: `sglang-fp8rl plan MODEL --tp N --ep N --dtype D "
            "--options JSON --json > FILE`.",
        )


install()
