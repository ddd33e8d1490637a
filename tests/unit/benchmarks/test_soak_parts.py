"""Clients of the soak count every answer that is not what they asked for."""

from __future__ import annotations

import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from soaking.generating import Generators


class Answering(BaseHTTPRequestHandler):
    body = b""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.end_headers()
        self.wfile.write(self.body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.mark.parametrize(
    "body", [b"no json", b"{}", b"[]", b'{"output_ids": null}', b'{"output_ids": []}']
)
def test_another_answer_than_tokens_is_lost(body):
    answering = type("Answering", (Answering,), {"body": body})
    with ThreadingHTTPServer(("127.0.0.1", 0), answering) as server:
        threading.Thread(target=server.serve_forever).start()
        with Generators(f"http://127.0.0.1:{server.server_port}", 100, 1, 0) as generators:
            time.sleep(0.3)
        server.shutdown()
    assert generators.counts.lost
    assert len(generators.counts.lost) == generators.counts.asked
