"""A small HTTP server that answers in JSON, for tests of what asks it."""

from __future__ import annotations

import json
import threading
from email.message import Message
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class JsonServer(ThreadingHTTPServer):
    """Runs on a port of its own while it is entered."""

    daemon_threads = True
    # Its default of 5 resets connections of a client that opens 64 on a busy machine.
    request_queue_size = 256

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.location: str | None = None  # that answers redirect to
        self._thread = threading.Thread(target=self.serve_forever, args=(0.02,))

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def reply_to(self, path: str, body: Any, headers: Message) -> tuple[int, Any]:
        """Status and content of an answer, bytes as they are; `body` is None of what is asked for by GET."""
        raise NotImplementedError

    def __enter__(self) -> JsonServer:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()
        self._thread.join()
        self.server_close()


class _Handler(BaseHTTPRequestHandler):
    server: JsonServer

    def do_GET(self) -> None:
        self._reply(None)

    def do_POST(self) -> None:
        self._reply(json.loads(self.rfile.read(int(self.headers["Content-Length"])) or "{}"))

    def _reply(self, body: Any) -> None:
        status, content = self.server.reply_to(self.path, body, self.headers)
        is_json = not isinstance(content, bytes)
        data = json.dumps(content).encode() if is_json else content
        self.send_response(status)
        if is_json:
            self.send_header("Content-Type", "application/json")
        if self.server.location is not None:
            self.send_header("Location", self.server.location)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        """Nothing on the terminal."""
