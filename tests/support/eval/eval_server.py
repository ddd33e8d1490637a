"""A tiny HTTP server that speaks the two completion protocols, with faults on demand.

For tests of the client only; what a real SGLang server does is tested in `tests/engine`.
"""

from __future__ import annotations

import contextlib
import json
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

# Called with the prompt and how often it was asked before; returns the response's text.
Model = Callable[[str, int], str]


class FakeServer(ThreadingHTTPServer):
    """Answers with `model`; `faults` are replies (status, body) given first, instead."""

    daemon_threads = True
    # Its default of 5 resets connections of a client that opens 64 on a busy machine.
    request_queue_size = 256

    def __init__(self, model: Model) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.model = model
        self.faults: list[tuple[int, Any]] = []
        self.asked: Counter[str] = Counter()
        self.bodies: list[dict[str, Any]] = []
        self.in_flight = self.most_in_flight = 0
        self.finish_reason = "stop"
        self.identity: dict[str, Any] = {"model_path": "tiny", "quantization": "fp8"}
        self.guard = threading.Lock()
        self.delay = threading.Event()  # never set: only waited for

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class _Handler(BaseHTTPRequestHandler):
    server: FakeServer

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        pages = {
            "/v1/models": {"data": [{"id": "tiny-model"}]},
            "/server_info": self.server.identity | {"port": 1},
            "/model_info": {"weight_version": "7"},
        }
        page = pages.get(self.path)
        self._reply(200 if page else 404, page or {"error": "no such page"})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with self.server.guard:
            self.server.bodies.append(body)
            self.server.in_flight += 1
            self.server.most_in_flight = max(self.server.most_in_flight, self.server.in_flight)
            fault = self.server.faults.pop(0) if self.server.faults else None
            chat = self.path == "/v1/chat/completions"
            prompt = body["messages"][0]["content"] if chat else str(body.get("text"))
            times = self.server.asked[prompt]
            self.server.asked[prompt] += fault is None
        self.server.delay.wait(0.01)
        with self.server.guard:
            self.server.in_flight -= 1
        if fault is not None:
            self._reply(*fault)
            return
        text = self.server.model(prompt, times)
        self._reply(200, self._chat(text) if chat else self._generate(text))

    def _chat(self, text: str) -> dict[str, Any]:
        message = {"role": "assistant", "content": text, "reasoning_content": None}
        choice = {"index": 0, "message": message, "finish_reason": self.server.finish_reason}
        usage = {"prompt_tokens": 5, "completion_tokens": 11, "total_tokens": 16}
        named = {"id": "1", "object": "chat.completion", "created": 1, "model": "tiny-model"}
        return named | {"choices": [choice], "usage": usage}

    def _generate(self, text: str) -> dict[str, Any]:
        reason = {"type": self.server.finish_reason}
        return {"text": text, "meta_info": {"finish_reason": reason, "completion_tokens": 11}}

    def _reply(self, status: int, body: Any) -> None:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)


@contextlib.contextmanager
def serving(model: Model) -> Iterator[FakeServer]:
    server = FakeServer(model)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
