"""A tiny HTTP server that speaks the two completion protocols, with faults on demand.

For tests of the client only; what a real SGLang server does is tested in `tests/engine`.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from email.message import Message
from typing import Any

from support.json_server import JsonServer

# Called with the prompt and how often it was asked before; returns the response's text.
Model = Callable[[str, int], str]


class FakeServer(JsonServer):
    """Answers with `model`; `faults` are replies (status, body) given first, instead."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.model = model
        self.faults: list[tuple[int, Any]] = []
        self.asked: Counter[str] = Counter()
        self.bodies: list[dict[str, Any]] = []
        self.keys: set[str | None] = set()
        self.in_flight = self.most_in_flight = 0
        self.finish_reason = "stop"
        self.identity: dict[str, Any] = {"model_path": "tiny", "quantization": "fp8"}
        self.guard = threading.Lock()
        self.delay = threading.Event()  # never set: only waited for

    def reply_to(self, path: str, body: Any, headers: Message) -> tuple[int, Any]:
        self.keys.add(headers.get("authorization"))
        if body is None:
            return self._page(path)
        with self.guard:
            self.bodies.append(body)
            self.in_flight += 1
            self.most_in_flight = max(self.most_in_flight, self.in_flight)
            fault = self.faults.pop(0) if self.faults else None
            chat = path == "/v1/chat/completions"
            prompt = body["messages"][0]["content"] if chat else str(body.get("text"))
            times = self.asked[prompt]
            self.asked[prompt] += fault is None
        self.delay.wait(0.01)
        with self.guard:
            self.in_flight -= 1
        if fault is not None:
            return fault
        return 200, self.chat(prompt, times) if chat else self.generate(prompt, times)

    def _page(self, path: str) -> tuple[int, Any]:
        pages = {
            "/v1/models": {"data": [{"id": "tiny-model"}]},
            "/server_info": self.identity | {"port": 1},
            "/model_info": {"weight_version": "7"},
        }
        page = pages.get(path)
        return 200 if page else 404, page or {"error": "no such page"}

    def chat(self, prompt: str, times: int) -> dict[str, Any]:
        text = self.model(prompt, times)
        message = {"role": "assistant", "content": text, "reasoning_content": None}
        choice = {"index": 0, "message": message, "finish_reason": self.finish_reason}
        usage = {"prompt_tokens": 5, "completion_tokens": 11, "total_tokens": 16}
        named = {"id": "1", "object": "chat.completion", "created": 1, "model": "tiny-model"}
        return named | {"choices": [choice], "usage": usage}

    def generate(self, prompt: str, times: int) -> Any:
        meta = {"finish_reason": {"type": self.finish_reason}, "completion_tokens": 11}
        return {"text": self.model(prompt, times), "meta_info": meta}
