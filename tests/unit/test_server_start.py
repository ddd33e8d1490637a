"""A server that is started: on which port, on which other one, and what is said where it is not."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import pytest

from sglang_fp8rl.errors import HostError
from sglang_fp8rl.lab.testing import ports
from sglang_fp8rl.lab.testing.ports import ephemeral_range, free_port
from sglang_fp8rl.lab.testing.server import ServerProcess
from sglang_fp8rl.lab.testing.start_failure import cause_of, is_address_in_use

# -- which port ------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["32768\t60999\n", "1024 40000", "15000 64000", None, "what"])
def test_a_port_is_outside_of_what_the_kernel_gives_away(tmp_path, monkeypatch, text):
    path = tmp_path / "ip_local_port_range"
    if text is not None:
        path.write_text(text)
    monkeypatch.setattr(ports, "EPHEMERAL_RANGE", path)
    low, high = ephemeral_range()
    if text in (None, "what"):
        assert (low, high) == (49152, 65535)
    for _ in range(20):
        port = free_port()
        # SGLang derives further ones: with DP attention its rendezvous and queues are behind 233.
        assert not any(low <= port + more <= high for more in (0, 233, 239))


def test_a_host_with_no_port_outside_gets_one_all_the_same(tmp_path, monkeypatch):
    path = tmp_path / "ip_local_port_range"
    path.write_text("1024 65535")
    monkeypatch.setattr(ports, "EPHEMERAL_RANGE", path)
    assert 10_000 <= free_port() <= 65_535


@pytest.mark.parametrize("more", [0, 233, 239])
@pytest.mark.parametrize("address", ["127.0.0.1", ""], ids=["loopback", "all"])
def test_a_port_is_not_chosen_where_it_or_what_follows_from_it_is_bound(monkeypatch, address, more):
    first, second = free_port(), free_port()
    assert first != second
    given = [first, second]
    monkeypatch.setattr(ports._DRAWS, "sample", lambda candidates, count: given)
    with socket.socket() as held:
        held.bind((address, first + more))
        assert free_port() == second
    assert free_port() == first


# -- a port that is taken in between ---------------------------------------------------------------

SERVER = """
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer
class Healthy(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
port = next(int(word.split("=")[1]) for word in sys.argv if word.startswith("--port="))
HTTPServer(("127.0.0.1", port), Healthy).serve_forever()
"""


class Small(ServerProcess):
    """A server whose first ports are taken by somebody else between choice and start."""

    def __init__(self, log_path: Path, taken: int, code: str = SERVER) -> None:
        super().__init__("model", log_path=log_path, timeout=60)
        self.code, self.left, self.held = code, taken, []

    def _launch(self):
        if self.left:
            self.held.append(self._somebody())
            self.left -= 1
        with self.log_path.open("wb") as log:
            command = [sys.executable, "-c", self.code, *self.command[3:]]
            return subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)

    def _somebody(self) -> socket.socket:
        """The first listens and never answers, which takes five seconds to find out; the others don't listen."""
        if not self.held:
            return socket.create_server(("127.0.0.1", self.port))
        held = socket.socket()
        held.bind(("127.0.0.1", self.port))
        return held

    def stop(self) -> None:
        super().stop()
        for one in self.held:
            one.close()
        self.held = []


def test_a_server_whose_port_was_taken_comes_up_on_another(tmp_path):
    server = Small(tmp_path / "log", taken=1)
    chosen = server.port
    with server:
        assert server.port != chosen
        assert server.url.endswith(f":{server.port}")
        assert [word for word in server.command if "--port" in word] == [f"--port={server.port}"]
        assert server.alive()


def test_a_server_whose_ports_are_all_taken_says_so(tmp_path):
    server = Small(tmp_path / "log", taken=100)
    with pytest.raises(HostError, match=r"OSError.*ddress already in use"):
        server.start()
    assert server.left == 97


def test_a_server_that_fails_for_another_reason_is_started_once(tmp_path):
    server = Small(tmp_path / "log", taken=0, code="raise KeyError('of its own')")
    launched = []
    launch = server._launch
    server._launch = lambda: launched.append(1) or launch()
    with pytest.raises(HostError, match="KeyError: 'of its own'"):
        server.start()
    assert launched == [1]


# -- what is said ----------------------------------------------------------------------------------

# Logs of SGLang 0.5.23, most of their frames left out.
BEFORE = """\
site-packages/sglang/launch_server.py:71: UserWarning: 'python -m sglang.launch_server' is still \
supported, but 'sglang serve' is the recommended entrypoint.
  Example: sglang serve --model-path <model> [options]
  warnings.warn(
[2026-11-23 14:23:08] server_args={'model_path': 'm', 'expert_balancedness_report_mode': 'off'}
[2026-11-23 14:23:09] Ignore import error when loading sglang.srt.models.falcon_mamba: cannot import
[2026-11-23 14:23:17] Failed to get yes/no token IDs dynamically: 'NoneType' object has no attribute
[2026-11-23 14:23:17] INFO:     Application startup complete.
"""
FREEZE_GC = """\
[2026-11-23 14:22:31] post-warmup freeze_gc failed
Traceback (most recent call last):
  File "site-packages/urllib3/connection.py", line 239, in _new_conn
    sock = connection.create_connection(
           ^^^^^^^^^^^^^^^^^^^^^^^^^^^^^
ConnectionRefusedError: [Errno 111] Connection refused

The above exception was the direct cause of the following exception:

Traceback (most recent call last):
  File "site-packages/urllib3/connection.py", line 254, in _new_conn
    raise NewConnectionError(
urllib3.exceptions.NewConnectionError: HTTPConnection(host='127.0.0.1', port=13193): Failed to \
establish a new connection: [Errno 111] Connection refused

During handling of the above exception, another exception occurred:

Traceback (most recent call last):
  File "site-packages/requests/adapters.py", line 729, in send
    raise ConnectionError(e, request=request)
requests.exceptions.ConnectionError: HTTPConnectionPool(host='127.0.0.1', port=13193): Max retries
"""
BIND = """\
[2026-11-23 14:23:17] ERROR:    [Errno 98] error while attempting to bind on address \
('127.0.0.1', 31015): address already in use
[2026-11-23 14:23:17] INFO:     Waiting for application shutdown.
"""
OPTION = """\
[2026-11-23 14:24:14] Load weight begin. avail mem=21.45 GB

Loading shards:   0% | 0/1 [00:00<?, ?it/s][2026-11-23 14:24:14] Scheduler hit an exception: \
Traceback (most recent call last):
  File "site-packages/sglang/srt/managers/scheduler.py", line 6362, in run_scheduler_process
    scheduler = Scheduler(server_args, port_args)
                ^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^
sglang_fp8rl.errors.ConfigError: quantization_config: unknown key 'misalign'

[2026-11-23 14:24:14] Received sigquit from a child process. It usually means the child failed.
[2026-11-23 14:24:14] kill_process_tree called: parent_pid=8183, include_parent=True, pid=8183
"""
NO_MODEL = """\
[2026-11-23 14:24:50] kill_process_tree called: parent_pid=8356, include_parent=False, pid=8356
Traceback (most recent call last):
  File "site-packages/transformers/utils/hub.py", line 479, in cached_files
    hf_hub_download(
huggingface_hub.errors.HFValidationError: Repo id must be in the form 'repo_name'

The above exception was the direct cause of the following exception:

Traceback (most recent call last):
  File "site-packages/transformers/utils/hub.py", line 595, in cached_files
    raise OSError(f"{e}") from e
OSError: Repo id must be in the form 'repo_name'
"""
FLAG = """\
usage: sglang serve [-h] --model-path MODEL_PATH
                    [--metrics-host METRICS_HOST]
sglang serve: error: unrecognized arguments: --no-such-flag
"""
RENDEZVOUS = """\
torch.distributed.DistNetworkError: The server socket has failed to listen on any local network \
address. port: 29500, useIpv6: false, code: -98, name: EADDRINUSE, message: address already in use
"""
PORT_BASE = """\
ValueError: port_base at 31249 is not available in 30 seconds. port_base at 31249 is not available
"""
FOLLOWS = OPTION.replace("ConfigError: quantization_config", "TypeError: what follows from it")


@pytest.mark.parametrize(
    ("log", "said", "unsaid"),
    [
        (BEFORE + BIND + FREEZE_GC, ["31015", "address already in use"], ["freeze_gc", "refused"]),
        (BEFORE + FREEZE_GC + BIND, ["31015", "address already in use"], ["refused", "Max retr"]),
        (BEFORE + OPTION + FOLLOWS, ["Scheduler hit", "unknown key 'misalign'"], ["TypeError"]),
        (NO_MODEL, ["HFValidationError: Repo", "OSError: Repo"], ["kill_process", "hf_hub"]),
        (FLAG, ["error: unrecognized arguments: --no-such-flag"], ["usage"]),
        (BEFORE, ["no error in its log", "Application startup complete"], []),
        ("", ["no error in its log"], []),
    ],
    ids=["port", "port-late", "option", "no-model", "flag", "killed", "empty"],
)
def test_the_cause_is_the_first_error_of_the_log(log, said, unsaid):
    cause = cause_of(log)
    assert all(words in cause for words in said), cause
    assert not any(words in cause for words in unsaid), cause
    assert "File " not in cause


def test_a_server_that_serves_has_no_cause():
    """SGLang asks itself for a collection before it listens, and goes on when nobody answers."""
    assert cause_of(BEFORE + FREEZE_GC).startswith("no error")


@pytest.mark.parametrize("log", [BIND, RENDEZVOUS, PORT_BASE])
def test_a_port_that_is_taken_is_told_from_other_failures(log):
    assert is_address_in_use(BEFORE + log + FREEZE_GC)
    assert not is_address_in_use(BEFORE + FREEZE_GC + OPTION + NO_MODEL + FLAG)
