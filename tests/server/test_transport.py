"""How weights get to a server: buffers that are opened once and let go of, requests that are asked once, seconds by stage."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support.server.served import Served, weights

from sglang_fp8rl.wire.staging import COUNT

pytestmark = [pytest.mark.engine, pytest.mark.timeout(1200), pytest.mark.xdist_group("server")]

STAGES = {
    "opening_handles", "load_weights", "waiting_for_reads", "flushing", "answering", "between_requests",
}  # fmt: skip


def mapped(case: Served) -> int:
    """Most files of shared memory with tensors that one of the server's processes has mapped."""
    group = os.getpgid(case.server.pid)
    most = 0
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if os.getpgid(int(process.name)) != group:
                continue
            lines = (process / "maps").read_text().splitlines()
        except OSError:  # ended meanwhile
            continue
        most = max(most, len({line.split()[5] for line in lines if "/dev/shm/torch_" in line}))
    return most


def test_buffers_stay_open_for_one_refit_and_no_longer(case, client):
    found = []
    for which in ("second", "first", "second"):
        client.update(
            weights(which), bucket_bytes=100_000, on_bucket=lambda *_: found.append(mapped(case))
        )
        assert mapped(case) == 0
    assert max(found) == COUNT
    client.update(weights("first"), bucket_bytes=100_000)
    case.check("first")


def test_the_seconds_of_a_refit_are_those_of_its_stages(case, client):
    client.update(weights("second"), bucket_bytes=100_000)
    began = time.perf_counter()
    result = client.update(weights("first"), bucket_bytes=100_000)
    wall = time.perf_counter() - began
    stages = case.client.status()["last_refit"]["stages"]
    assert set(stages) == STAGES
    assert all(seconds > 0 for seconds in stages.values())
    # From its first request to its last answer: less than the client saw, and more than all that it waited for,
    # but for what is HTTP and scheduling.
    assert case.client.status()["last_refit"]["seconds"] <= stages["load_weights"] * 1.01
    assert stages["load_weights"] < sum(stages.values()) <= wall
    assert sum(result.stages.values()) == pytest.approx(result.seconds)
    assert result.seconds <= wall


def test_memory_of_a_trainer_that_was_killed_in_a_refit_is_let_go_of(case):
    code = (
        "import sys, time, torch\n"
        "from support.server.served import ClientWithoutSessions, weights\n"
        "def wait(*_):\n"
        "    print('sent', flush=True)\n"
        "    time.sleep(600)\n"
        "ClientWithoutSessions(sys.argv[1]).update(weights('second'), bucket_bytes=100_000, on_bucket=wait)\n"
    )
    trainer = subprocess.Popen(
        [sys.executable, "-c", code, case.server.url],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert trainer.stdout.readline() == b"sent\n"
    assert mapped(case) > 0
    os.kill(trainer.pid, signal.SIGKILL)
    trainer.wait()
    trainer.stdout.close()
    deadline = time.monotonic() + 30
    while mapped(case) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert mapped(case) == 0
    case.client.update(weights("first"), bucket_bytes=100_000)
    case.check("first")
