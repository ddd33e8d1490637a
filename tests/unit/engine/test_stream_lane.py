"""What a loader queues in another thread goes to the stream of its call."""

from concurrent.futures import ThreadPoolExecutor

import torch
from support.streams import use_streams

from sglang_fp8rl.engine.interception import stream_lane


def test_another_thread_works_on_the_stream_of_the_call(monkeypatch):
    streams = use_streams(monkeypatch)
    seen = []

    def load(lane):
        with lane():
            seen.append(streams.current)
        seen.append(streams.current)

    with torch.cpu.stream("scheduler"):
        lane = stream_lane(torch.device("cpu"))
        load(lane)
        with ThreadPoolExecutor(1) as pool:
            pool.submit(load, lane).result()
    assert seen == ["scheduler", "scheduler", "scheduler", "default"]
