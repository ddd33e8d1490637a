"""The status and the metrics of a running server, where a client finds them."""

from __future__ import annotations

import re

import pytest
import requests
from support.engine.forked_server import ForkedServer
from support.engine.models import checkpoint
from support.server.served import (
    HAS_SESSIONS,
    MODEL,
    ONE_THREAD,
    QUANTIZED,
    Client,
    version_of,
    weights,
)
from typer.testing import CliRunner

from sglang_fp8rl.errors import RefitError
from sglang_fp8rl.lab import cli
from sglang_fp8rl.lab.testing.server import ServerProcess

pytestmark = [pytest.mark.engine, pytest.mark.xdist_group("server")]

KEYS = {"api_key": "key", "admin_api_key": "admin"}


@pytest.fixture
def guarded(server, checkpoint_dir):
    """A server that wants two keys and counts, with an FP8 KV cache."""
    keys = ("--api-key=key", "--admin-api-key=admin")
    flags = (*keys, "--enable-metrics", "--kv-cache-dtype=fp8_e4m3")
    path = checkpoint(checkpoint_dir, MODEL, "first")
    return server(path, QUANTIZED, *flags, env=ONE_THREAD)


def metrics_of(server: ServerProcess) -> str:
    for _ in range(5):
        answer = requests.get(server.url + "/metrics", timeout=60)
        if answer.status_code != 500:  # SGLang reads files that its other processes are writing
            break
    return answer.text


def sample(text: str, name: str) -> float | None:
    found = re.search(rf"^sglang:fp8rl_{name}(?:{{[^}}]*}})? (\S+)$", text, re.MULTILINE)
    return float(found.group(1)) if found else None


def metric(text: str, name: str) -> float:
    value = sample(text, name)
    assert value is not None, f"{name} is not in {text[-2000:]}"
    return value


def test_an_update_with_both_keys_a_version_and_metrics(guarded):
    client = Client(guarded.url, **KEYS)
    before = version_of(client)
    with pytest.raises(Exception, match="admin"):
        Client(guarded.url, api_key="key").update(weights("second"), weight_version="wrong")
    assert version_of(client) == before
    with pytest.raises(Exception, match="401"):  # it makes derived weights anew
        Client(guarded.url, api_key="key").fingerprint()
    assert client.fingerprint().numbers
    seen: list[float] = []

    def look(*_: int) -> None:
        seen.append(metric(metrics_of(guarded), "kv_certified"))

    second = weights("second")
    client.update(second, bucket_bytes=1 << 16, on_bucket=look, weight_version="step-2")
    assert len(seen) > 6
    assert set(seen[:-2]) == {0.0}  # buckets are told of while the next is on its way
    client.update(weights("first"), weight_version="step-3")
    assert version_of(client) == "step-3"
    section = client.server_info()["internal_states"][0]["fp8rl"]
    assert client.status() == {**section, "replicas": 1}
    text = metrics_of(guarded)
    assert metric(text, "refits_total") == 2
    assert metric(text, "consistent") == 1
    assert metric(text, "refit_bytes") == section["last_refit"]["bytes"]
    assert metric(text, "kv_certified") == 1


def test_verify_takes_the_key_of_a_guarded_server(guarded):
    without = CliRunner().invoke(cli.app, ["verify", guarded.url])
    assert without.exit_code == 2
    assert "api_key" in without.stderr
    keys = ["--api-key=key", "--admin-api-key=admin"]
    assert CliRunner().invoke(cli.app, ["verify", guarded.url, keys[0]]).exit_code == 2
    with_keys = CliRunner().invoke(cli.app, ["verify", guarded.url, *keys])
    assert (with_keys.exit_code, with_keys.stderr) == (0, "")


@pytest.mark.slow
def test_replicas_say_which_they_are_are_updated_from_disk_and_refused_from_tensors(
    checkpoint_dir, tmp_path
):
    """A server of its own, and no longer than this: SGLang's controller of replicas takes a core to wait."""
    path = checkpoint(checkpoint_dir, MODEL, "first")
    cores = "0|1" if HAS_SESSIONS else "0"  # SGLang 0.5.16 wants those of one replica
    env = {**ONE_THREAD, "SGLANG_CPU_OMP_THREADS_BIND": cores}
    args, log = [QUANTIZED, "--dp-size=2"], tmp_path / "server.log"
    with ForkedServer(path, args, log_path=log, env=env) as server:
        client = Client(server.url)
        states = client.server_info()["internal_states"]
        status, fingerprint = client.status(), client.fingerprint()
        with pytest.raises(RefitError, match="2 data-parallel replicas"):
            client.update(weights("second"))
        second = checkpoint(checkpoint_dir, MODEL, "second")
        body = {"model_path": str(second)}
        answer = requests.post(server.url + "/update_weights_from_disk", json=body, timeout=60)
        assert answer.ok, answer.text
        updated, whole = client.fingerprint(), client.status()
    assert sorted(state["fp8rl"]["replica"] for state in states) == [0, 1]
    assert (status["replicas"], status["replica"], status["state"]) == (2, 0, "whole")
    assert not fingerprint.differing
    assert (whole["replicas"], whole["state"]) == (2, "whole")
    assert not updated.differing
    same = {name for name, number in updated.numbers.items() if number == fingerprint.numbers[name]}
    assert updated.numbers.keys() == fingerprint.numbers.keys()
    assert not same
