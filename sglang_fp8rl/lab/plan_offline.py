"""The plan of a model without its weights: SGLang's own model class, built on the `meta` device.

A process of its own goes through SGLang's own start, as rank 0 of `tp_size`, up to the place where
a loader builds the model, shows its loaders every name of the checkpoint on `meta`, and leaves with
the document that a server would give. The other ranks are not there: torch's `fake` process group
stands in for them, and every rank decides alike, from its own shard's shape. Needs `config.json`, no
weights, no GPU and no memory to speak of.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any, NoReturn

from ..compat import CPU_PLATFORM
from ..config import QUANTIZATION_METHOD
from ..errors import Fp8RlError, HostError
from ..versions import RANKS_ARE_GLOBAL
from ..wire.plan import RefitPlan
from .testing.weight_sets import Checkpoint

_TIMEOUT_SECONDS = 600
_EXCEPTION = re.compile(r"([A-Za-z_]\w*\.)*[A-Z]\w*(Error|Exception|Exit|Interrupt)(:|$)")
# torch's, in front of each line of what a rank raises.
_RANK = re.compile(r"\[rank\d+\]:(?!\s*(?:\[|Traceback))\s*")


def make_plan(
    model: str,
    *,
    tp_size: int = 1,
    ep_size: int = 1,
    dtype: str = "auto",
    options: Mapping[str, Any] | None = None,
    trust_remote_code: bool = False,
) -> RefitPlan:
    """What a server would serve, on each of its ranks; imports no SGLang here.

    Args:
        model: a directory with `config.json`, or a name that SGLang resolves.
        dtype: as the server's `--dtype`; by itself SGLang serves an FP32 checkpoint in FP16.
        options: of `fp8_blockwise_online`, as in the model's `quantization_config`.

    Raises:
        ConfigError: a path without a config.json that can be read.
        HostError: the model can't be built or has a module that can't be served; with its reason.
    """
    if Path(model).exists() or model.startswith(("/", ".", "~")):
        Checkpoint(Path(model)).config  # noqa: B018  read, or refused
    argv = [f"--model-path={model}", f"--tp-size={tp_size}", f"--ep-size={ep_size}"]
    argv += [f"--quantization={QUANTIZATION_METHOD}", "--load-format=dummy", "--device=cpu"]
    argv += ["--skip-tokenizer-init", f"--dtype={dtype}"]
    if options:
        override = {"quantization_config": dict(options)}
        argv.append(f"--json-model-override-args={json.dumps(override)}")
    if trust_remote_code:
        argv.append("--trust-remote-code")
    with tempfile.TemporaryDirectory(
        prefix="sglang-fp8rl-plan-", ignore_cleanup_errors=True
    ) as directory:
        answer_path, log_path = Path(directory, "answer.json"), Path(directory, "log")
        args = [str(answer_path), str(tp_size), *argv]
        # SGLang leaves temporary files behind.
        env = {**_child_env(tp_size), "TMPDIR": directory}
        outcome = run_in_new_interpreter(args, env, log_path)
        if not answer_path.exists():
            said = last_error(log_path.read_text(errors="replace"))
            how = "" if outcome in ("exit status 0", "exit status 1") else f" ({outcome})"
            raise HostError(
                model,
                f"SGLang did not come to build the model{how}: {said}",
                "SGLang has to build this model at this --tp, --ep and --dtype",
                "Try `python -m sglang.launch_server` with the same model.",
            )
        answer = json.loads(answer_path.read_text())
    if "error" in answer:
        rule = f"{QUANTIZATION_METHOD} can't serve it at tp {tp_size}"
        raise HostError(model, answer["error"], rule, "")
    return RefitPlan.from_dict(answer["document"])


def _child_env(tp_size: int) -> dict[str, str]:
    return {
        "SGLANG_PLATFORM": CPU_PLATFORM,
        "CUDA_VISIBLE_DEVICES": "",
        "SGLANG_CPU_OMP_THREADS_BIND": "|".join(["0"] * tp_size),
        # Rank 0 would wait for the others to open its queue.
        "SGLANG_USE_MESSAGE_QUEUE_BROADCASTER": "false",
    }


def last_error(log: str) -> str:
    """What the last traceback in a log ends with, and its statement where the exception says nothing; its last
    line if there is none."""
    marked = [(line, _RANK.sub("", line, count=1)) for line in map(str.strip, log.splitlines())]
    marked = [one for one in marked if one[1].strip(" \t^~")]
    lines = [line for _, line in marked]
    ends = [at for at, line in enumerate(lines) if _EXCEPTION.match(line)]
    if not ends:
        return lines[-1] if lines else "its log is empty"
    behind = takewhile(lambda one: one[0] != one[1], marked[ends[-1] + 1 :])
    found = " ".join([lines[ends[-1]], *(line for _, line in behind)])
    return found if ": " in found else f"{found}: {lines[max(0, ends[-1] - 1)]}"


def run_in_new_interpreter(args: Sequence[str], env: Mapping[str, str], log_path: Path) -> str:
    """Run `child_main(args)` with `env` added, and what it prints in `log_path`; how it ended, in words."""
    # SGLang's scheduler sends SIGQUIT to its parent when it fails. The parent is this process.
    before = signal.signal(signal.SIGQUIT, signal.SIG_IGN)
    # So that the child goes with this process.
    ours = signal.signal(signal.SIGTERM, lambda signum, _: sys.exit(128 + signum))
    try:
        with log_path.open("wb") as log:
            ended = subprocess.run(
                [sys.executable, "-m", __spec__.name, *args],
                env={**os.environ, **env},
                stdout=log,
                stderr=log,
                timeout=_TIMEOUT_SECONDS,
                check=False,
            )
        return f"exit status {ended.returncode}"
    except subprocess.TimeoutExpired:
        return f"not done after {_TIMEOUT_SECONDS} s"
    finally:
        signal.signal(signal.SIGQUIT, before)
        signal.signal(signal.SIGTERM, ours)


# -- in the child ------------------------------------------------------------------------------


def child_main(args: Sequence[str]) -> None:
    """Build the model and write the answer: the path for it, ranks, SGLang's arguments.

    Side effects on the host: a fake process group; the process ends, with the answer, before weights are filled.
    """
    answer_path, tp_size, argv = Path(args[0]), int(args[1]), list(args[2:])
    from sglang.srt.plugins import load_plugins
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    def leave(answer: dict[str, Any]) -> NoReturn:
        answer_path.write_text(json.dumps(answer))
        os._exit(0)  # the rest of SGLang's start is of no use

    def load_on_meta(original: Any, loader: Any, *, model_config: Any, device_config: Any) -> None:
        device_config.device = "meta"
        try:
            original(loader, model_config=model_config, device_config=device_config)
        except Fp8RlError as error:
            leave({"error": str(error)})

    def leave_with_plan(model: Any) -> None:
        from ..engine.plan.extension import Plan
        from ..engine.refit import refit_of

        refit: Any = refit_of(model)  # is there: `--quantization` asks for it
        leave({"document": Plan(refit).made.as_dict()})

    load = "sglang.srt.model_loader.loader.DummyModelLoader.load_model"
    fill = "sglang.srt.model_loader.loader.initialize_dummy_weights"
    HookRegistry.register(load, load_on_meta, HookType.AROUND)
    HookRegistry.register(fill, leave_with_plan, HookType.REPLACE)
    load_plugins()
    HookRegistry.apply_hooks()  # where the plugins were loaded before, as in a fork
    _fake_other_ranks(tp_size)
    _start_scheduler(argv)


def _fake_other_ranks(tp_size: int) -> None:
    """A world of `tp_size` whose other ranks stay silent: SGLang finds it and takes it for its own."""
    import torch.distributed
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=tp_size)
    native = torch.distributed.new_group

    def new_fake_group(*args: Any, **kwargs: Any) -> Any:
        return native(*args, **(kwargs | {"backend": "fake", "pg_options": None}))

    torch.distributed.new_group = new_fake_group


def _start_scheduler(argv: list[str], rank: int = 0) -> None:
    """As SGLang's launcher starts a rank of tensor parallelism."""
    from sglang.srt.managers import scheduler as host
    from sglang.srt.server_args import PortArgs, prepare_server_args

    server_args = prepare_server_args(argv)
    ranks: dict[str, Any] = {"gpu_id": rank, "tp_rank": rank, "pp_rank": 0, "dp_rank": None}
    if not RANKS_ARE_GLOBAL:
        ranks |= {"attn_cp_rank": 0, "moe_dp_rank": 0, "moe_ep_rank": rank}
    host.run_scheduler_process(
        server_args, PortArgs.init_new(server_args), pipe_writer=None, **ranks
    )


if __name__ == "__main__":
    child_main(sys.argv[1:])
