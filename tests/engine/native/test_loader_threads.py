"""Loaders that run in a thread pool work on the stream that the scheduler reads on."""

import threading

import pytest
import torch
from support.engine.commands import update
from support.engine.pool import on
from support.streams import use_streams

pytestmark = pytest.mark.engine


def streams_of_casts(scheduler, named_tensors):
    """The stream of each cast of an update, and how many threads other than this one cast."""
    from sglang_fp8rl.engine.native import loader_call

    seen, here, matrix_writes = [], threading.get_ident(), loader_call.matrix_writes

    def noted(*args):
        seen.append((streams.current, threading.get_ident()))
        return matrix_writes(*args)

    with pytest.MonkeyPatch.context() as patched:
        streams = use_streams(patched)
        patched.setattr(loader_call, "matrix_writes", noted)
        with torch.cpu.stream("the scheduler's"):
            assert update(scheduler, named_tensors)[0]
    return {one for one, _ in seen}, len({thread for _, thread in seen} - {here})


@on("deepseek-v3-tp1")
def test_casts_in_loader_threads_go_to_the_stream_of_the_call(host):
    # Not all of it, so that no other test's recipe fits.
    named_tensors = list(host.model.second.items())[:-1]
    streams, threads = host.call(streams_of_casts, named_tensors)
    assert threads, "SGLang used no threads: this test shows nothing"
    assert streams == {"the scheduler's"}
