"""Clients that generate all the time, and count what they were promised and what they got."""

from __future__ import annotations

import random
import threading
from dataclasses import dataclass, field

import requests

_TOKENS = (1, 16)  # of one answer
_PROMPT = (2, 48)


@dataclass
class Counts:
    """Of all clients.

    Attributes:
        lost: what was not answered in full, each with the reason.
    """

    asked: int = 0
    tokens: int = 0
    lost: list[str] = field(default_factory=list)


class Generators:
    """So many threads with a connection each; a context manager.

    Args:
        vocab_size: prompts are of token ids below it.
    """

    def __init__(self, url: str, vocab_size: int, count: int, seed: int) -> None:
        self.counts = Counts()
        self._url, self._vocab_size = url, vocab_size
        self._stopping, self._lock = threading.Event(), threading.Lock()
        self._threads = [
            threading.Thread(target=self._generate, args=(random.Random(f"{seed} {number}"),))
            for number in range(count)
        ]

    def __enter__(self) -> Generators:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Every answer that was asked for is waited for."""
        self._stopping.set()
        for thread in self._threads:
            thread.join()

    def _generate(self, draw: random.Random) -> None:
        with requests.Session() as http:
            while not self._stopping.is_set():
                self._ask(http, draw)

    def _ask(self, http: requests.Session, draw: random.Random) -> None:
        tokens = draw.randint(*_TOKENS)
        prompt = [draw.randrange(3, self._vocab_size) for _ in range(draw.randint(*_PROMPT))]
        sampling = {"max_new_tokens": tokens, "temperature": 0.0, "ignore_eos": True}
        body = {"input_ids": prompt, "sampling_params": sampling}
        problem = ""
        try:
            answer = http.post(self._url + "/generate", json=body, timeout=300)
            found = len(answer.json()["output_ids"]) if answer.ok else 0
            if found != tokens:
                problem = (
                    f"HTTP {answer.status_code}: {found} of {tokens} tokens: {answer.text[:200]}"
                )
        except (requests.RequestException, LookupError, TypeError) as error:
            problem = f"no answer, or another one than of tokens: {error!r}"
        with self._lock:
            self.counts.asked += 1
            self.counts.tokens += 0 if problem else tokens
            self.counts.lost += [problem] if problem else []
