"""A real server whose port is taken while it starts; what it says of it is SGLang's."""

from __future__ import annotations

import socket

import pytest
from support.engine.forked_server import ForkedServer
from support.engine.models import checkpoint
from support.server.served import MODEL, ONE_THREAD, QUANTIZED

from sglang_fp8rl.client import RefitClient
from sglang_fp8rl.lab.testing.start_failure import cause_of

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(1200)]


class TakenMeanwhile(ForkedServer):
    """Somebody else binds its port between choice and start, once."""

    held: socket.socket | None = None

    def _launch(self):
        if self.held is None:
            self.held = socket.create_server(("127.0.0.1", self.port))
            self.first_log = ""
        else:
            self.first_log = self.log_path.read_text(errors="replace")
        return super()._launch()


def test_a_server_whose_port_was_taken_meanwhile_comes_up_on_another(checkpoint_dir, tmp_path):
    path = checkpoint(checkpoint_dir, MODEL, "first")
    server = TakenMeanwhile(path, (QUANTIZED,), log_path=tmp_path / "log", env=ONE_THREAD)
    first = server.port
    try:
        server.start()
        assert server.port != first
        assert len(RefitClient(server.url).generate([1, 2, 3], 8)["output_ids"]) == 8
        assert f"'127.0.0.1', {first}): address already in use" in cause_of(server.first_log)
        # A server that serves: what its log has of errors, SGLang survived.
        assert cause_of(server.log_path.read_text(errors="replace")).startswith("no error")
    finally:
        server.stop()
        server.held.close()
