"""What a loader queues in another thread goes to the stream of its call."""

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import torch

from sglang_fp8rl.engine.interception import stream_lane

DEVICE = torch.device("cpu")


class Streams(threading.local):
    """As a GPU's: each thread has a current stream of its own, the default one at first."""

    current = "default"


def use_streams(monkeypatch):
    streams = Streams()

    @contextmanager
    def stream(one):
        before, streams.current = streams.current, one
        try:
            yield
        finally:
            streams.current = before

    monkeypatch.setattr(torch.cpu, "current_stream", lambda device=None: streams.current)
    monkeypatch.setattr(torch.cpu, "stream", stream)
    return streams


def test_another_thread_works_on_the_stream_of_the_call(monkeypatch):
    streams = use_streams(monkeypatch)
    seen = []

    def load(lane):
        with lane():
            seen.append(streams.current)
        seen.append(streams.current)

    with torch.cpu.stream("scheduler"):
        lane = stream_lane(DEVICE)
        load(lane)
        with ThreadPoolExecutor(1) as pool:
            pool.submit(load, lane).result()
    assert seen == ["scheduler", "scheduler", "scheduler", "default"]
