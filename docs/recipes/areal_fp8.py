"""AReaL with its rollout in FP8: your training program, pointed at servers that you start.

    python -m sglang.launch_server --model-path MODEL --quantization fp8_blockwise_online --port 30000
    python docs/recipes/areal_fp8.py 127.0.0.1:30000 -- torchrun --nproc-per-node 8 train.py --config c.yaml

AReaL's `sglang:` section knows no `quantization`, and its own way of starting SGLang builds on the internals of one
version; so start one server for each replica (in any number: `HOST:PORT,HOST:PORT`). In your configuration leave
`actor.weight_update_mode` as it is: both `xccl` (a broadcast, to any machine) and `disk` reach these servers.

Tried: AReaL 1.0.4 with SGLang 0.5.23 on a CPU: the requests of its `SGLangBackend`, from disk and by a broadcast over
gloo, leave a fresh server's outputs. Not tried: its trainer, which needs a GPU; NCCL; several servers.
"""

from __future__ import annotations

import os
import sys

from needs import THIS_PACKAGE, need

need("sglang_fp8rl", THIS_PACKAGE)
import requests  # noqa: E402

# The last two are what AReaL's own launcher sets for its broadcast group.
ENVIRONMENT = {"AREAL_SPMD_MODE": "1", "NCCL_CUMEM_ENABLE": "0", "NCCL_NVLS_ENABLE": "0"}


def check(server: str) -> None:
    """Leave unless a server of this package answers there."""
    start = "start it with `python -m sglang.launch_server … --quantization fp8_blockwise_online`"
    try:
        answer = requests.get(f"http://{server}/fp8rl/status", timeout=60)
    except requests.RequestException as error:
        raise SystemExit(f"error: no server answers at {server}: {error}; {start}") from None
    if not answer.ok:
        raise SystemExit(f"error: {server} does not serve with this package; {start}")


def main(arguments: list[str]) -> None:
    """Check the servers, and become the training program."""
    servers, between, *program = arguments if len(arguments) > 2 else ("", "")
    if between != "--":
        raise SystemExit("usage: areal_fp8.py HOST:PORT[,HOST:PORT …] -- YOUR TRAINING COMMAND")
    need("areal", "pip install --no-deps areal==1.0.4 (its own pins want an older SGLang)")
    for server in servers.split(","):
        check(server)
    os.environ.update(ENVIRONMENT, AREAL_LLM_SERVER_ADDRS=servers)
    os.execvp(program[0], program)


if __name__ == "__main__":
    main(sys.argv[1:])
