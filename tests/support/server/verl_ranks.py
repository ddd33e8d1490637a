"""Two ranks of veRL's trainer, in processes of their own."""

from __future__ import annotations

import json
import os
import runpy
import sys
import threading
from pathlib import Path

from verl_trainer.names import CPU_PLATFORM

from sglang_fp8rl.lab.testing.ports import free_port
from sglang_fp8rl.lab.testing.server import cpu_env
from support.engine.forked import CONTEXT, Forked
from support.paths import BENCHMARKS
from support.server.served import Served, kill_group

WORLD_SIZE = 2
HANGS_AFTER = 240.0  # seconds; a refit takes one or two

# veRL takes the trainer's device from its platform: the CPU's, as in `make verl`.


class Rank:
    """`verl_trainer.py` in a process that has SGLang imported; lines go in and come out."""

    def __init__(self, log: Path, env: dict[str, str]) -> None:
        self.log = log
        read, tell = CONTEXT.Pipe(duplex=False)
        hear, answer = CONTEXT.Pipe(duplex=False)
        self.process = Forked(run_rank, (read, answer), log, {**os.environ, **cpu_env(), **env})
        self.stdin = os.fdopen(os.dup(tell.fileno()), "w")
        self.stdout = os.fdopen(os.dup(hear.fileno()))
        for end in (read, tell, hear, answer):
            end.close()


def run_rank(commands, answers) -> None:
    os.dup2(answers.fileno(), 1)
    sys.stdin = os.fdopen(os.dup(commands.fileno()))
    sys.stdout = os.fdopen(os.dup(answers.fileno()), "w")
    for end in (commands, answers):
        end.close()
    sys.path.insert(0, str(BENCHMARKS))
    runpy.run_path(str(Path(__file__).with_name("verl_trainer.py")), run_name="__main__")


class Trainer:
    """Two ranks of veRL's trainer."""

    def __init__(self, logs: Path) -> None:
        env = {
            **CPU_PLATFORM,
            "WORLD_SIZE": str(WORLD_SIZE),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(free_port()),
            "OMP_NUM_THREADS": "1",
        }
        self.ranks = [
            Rank(logs / f"trainer-{rank}.log", {**env, "RANK": str(rank)})
            for rank in range(WORLD_SIZE)
        ]

    def start_refit(self, case: Served, path: Path, dtype: str, bucket_bytes: int, **more) -> None:
        """Have all ranks make one full update."""
        command = {
            "port": case.server.port,
            "path": str(path),
            "dtype": dtype,
            "bucket_bytes": bucket_bytes,
            **more,
        }
        for rank in self.ranks:
            rank.stdin.write(json.dumps(command) + "\n")
            rank.stdin.flush()

    def answer(self, rank: int) -> dict:
        """What one rank has to say of it: the server's answers, or the error; or that it hangs."""
        end = threading.Timer(HANGS_AFTER, self.close)
        end.start()
        try:
            return self._answer(rank)
        finally:
            end.cancel()

    def _answer(self, rank: int) -> dict:
        for line in self.ranks[rank].stdout:
            if line.startswith(('{"answers"', '{"error"')):
                return json.loads(line)
        raise AssertionError(self.log(rank))

    def log(self, rank: int) -> str:
        return self.ranks[rank].log.read_text()[-4000:]

    def close(self) -> None:
        for rank in self.ranks:
            kill_group(rank.process)
