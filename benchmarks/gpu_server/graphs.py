"""G11: captured CUDA graphs go on after a refit, with the new weights, and are not captured again."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from sglang_fp8rl import RefitClient
from sglang_fp8rl.lab.testing.checkpoints import (
    make_config,
    make_state_dict,
    perturbed,
    save_checkpoint,
)
from sglang_fp8rl.lab.testing.outputs import ask, make_prompts
from sglang_fp8rl.lab.testing.server import ServerProcess

from .budget import Budget
from .refit import GateError
from .servers import OURS, Setting, running

# SGLang's own lines, "Capture {phase} CUDA graph begin." (model_runner_components/cuda_graph_setup.py)
_CAPTURE = re.compile(r"Capture .*graph begin\.")


def measure(setting: Setting, budget: Budget, tick: Callable[[str], None]) -> dict[str, Any]:
    """One row, of a small seeded checkpoint.

    Raises:
        GateError: outputs that did not change, are not the fresh server's, or a new capture.
    """
    config = make_config("qwen3")
    first = make_state_dict(config, seed=0)
    second = perturbed(first, seed=1)
    timeout = max(1.0, budget.left())
    servers = []
    for name, state in (("refitted", first), ("fresh", second)):
        path = save_checkpoint(setting.directory / name, config, state)
        servers.append(setting.server(path, OURS, f"graphs-{name}", timeout))
    refitted, fresh = servers
    prompts = make_prompts(config.vocab_size)
    tick("starting two servers for CUDA graphs")
    with running(servers):
        client = RefitClient(refitted.url, timeout=timeout)
        old = [answer.tokens for answer in ask(client, prompts)]
        before = captures_in(_log(refitted))
        tick("refit under captured graphs")
        client.update((name, tensor.to(setting.device)) for name, tensor in second.items())
        new = [answer.tokens for answer in ask(client, prompts)]
        expected = [answer.tokens for answer in ask(RefitClient(fresh.url), prompts)]
        after = captures_in(_log(refitted))
    _check(refitted, old != new, "the same tokens before and after", "a refit changes them")
    _check(
        refitted, new == expected, "other tokens than a fresh server's", "refit and fresh are equal"
    )
    _check(
        refitted, before == after, f"{after - before} captures more", "a refit captures no graph"
    )
    if setting.device.type == "cuda":
        _check(refitted, before > 0, "no line of a capture in the log", "graphs were captured")
    return {
        "id": "G11",
        "what": OURS.what,
        "captures_before": before,
        "captures_after": after,
        "answers_equal_to_fresh": len(expected),
    }


def captures_in(log: str) -> int:
    """Lines that say that a capture begins."""
    return sum(1 for line in log.splitlines() if _CAPTURE.search(line))


def _log(server: ServerProcess) -> str:
    return server.log_path.read_text(errors="replace")


def _check(server: ServerProcess, holds: bool, value: str, rule: str) -> None:
    if not holds:
        raise GateError("G11", value, rule, f"No number is published; see {server.log_path}.")
