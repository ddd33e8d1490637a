"""One server over two nodes (`--nnodes 2`, gloo over loopback), each with one rank of TP 2."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
from support.engine.models import checkpoint
from support.server.served import MODEL, ONE_THREAD, PROMPTS, QUANTIZED, Client, weights

from sglang_fp8rl.lab.testing.outputs import ask, differences
from sglang_fp8rl.lab.testing.ports import free_port
from sglang_fp8rl.lab.testing.server import ServerProcess

pytestmark = [pytest.mark.engine, pytest.mark.slow]

NODES = 2


@pytest.fixture
def client(checkpoint_dir, tmp_path):
    """Of the first node; the other one answers nothing but `/health`."""
    path = checkpoint(checkpoint_dir, MODEL, "first")
    flags = (QUANTIZED, "--tp-size=2", "--nnodes=2", f"--dist-init-addr=127.0.0.1:{free_port()}")
    nodes = [
        ServerProcess(
            path,
            (*flags, f"--node-rank={rank}"),
            log_path=tmp_path / f"node-{rank}.log",
            env=ONE_THREAD,
        )
        for rank in range(NODES)
    ]
    try:
        # Neither is healthy without the other. SGLang's processes end with the thread that started
        # them, so the threads stay.
        with ThreadPoolExecutor(NODES) as pool:
            list(pool.map(ServerProcess.start, nodes))
            yield Client(nodes[0].url)
    finally:
        for node in nodes:
            node.stop()


def test_two_nodes_hold_what_was_sent_byte_for_byte(client):
    """Over all ranks: after its start, after an update, and after one back."""
    fresh, outputs = client.fingerprint(), ask(client, PROMPTS)
    client.verify(weights("first")).check("after the start")
    client.update(weights("second"), bucket_bytes=100_000)
    client.verify(weights("second")).check("after an update")
    assert client.fingerprint().numbers != fresh.numbers
    assert differences(ask(client, PROMPTS), outputs)
    client.update(weights("first"))
    assert client.fingerprint().numbers == fresh.numbers
    assert differences(ask(client, PROMPTS), outputs) == []
    state = client.status()
    assert state["consistent"], state["problems"]
    assert state["last_refit"]["complete"]
