"""A sender's staging buffers stay open for the length of an update, and no longer."""

import base64

import pytest
from commands import digests, model_of, send
from pool import on

pytestmark = pytest.mark.engine


def staged_update(scheduler, buckets):
    """Send buckets as `RefitClient` does, each in one of two buffers; what is open after each."""
    import torch

    from sglang_fp8rl.wire.bucket import StagingBuffers, payload_of

    size = torch.distributed.get_world_size(scheduler.weight_updater.tp_cpu_group)
    held, staging = [], StagingBuffers(least=1 << 22)
    for at, bucket in enumerate(buckets, start=1):
        payload = payload_of(bucket, size, True, staging)
        texts = [base64.b64decode(text) for text in payload.texts]
        success, message = send(scheduler, texts, "flattened_bucket", at == len(buckets))
        assert success, message
        held.append(len(model_of(scheduler).fp8rl_refit.sender_memory))
    return held


@on("qwen3-tp1")
def test_two_buffers_stay_open_until_the_last_bucket_of_an_update(host):
    tensors = list(host.model.second.items())
    buckets = [tensors[at::5] for at in range(5)]
    for _ in range(2):  # recorded, then replayed
        assert host.call(staged_update, buckets) == [1, 2, 2, 2, 0]
        assert host.call_all(digests) == host.fresh("second").digests


def staged_until_it_fails(scheduler, bucket):
    """One bucket, and then one that can't be stored: a trainer without sessions stops there."""
    import torch

    from sglang_fp8rl.wire.bucket import StagingBuffers, payload_of

    size = torch.distributed.get_world_size(scheduler.weight_updater.tp_cpu_group)
    staging, found = StagingBuffers(least=1 << 22), []
    for named in (bucket, [(name + ".wrong", tensor) for name, tensor in bucket]):
        payload = payload_of(named, size, True, staging)
        texts = [base64.b64decode(text) for text in payload.texts]
        success, _ = send(scheduler, texts, "flattened_bucket", False)
        found.append((success, len(model_of(scheduler).fp8rl_refit.sender_memory)))
    return found


@on("qwen3-tp1")
def test_a_failed_update_gives_the_buffers_back(host):
    assert host.call(staged_until_it_fails, list(host.model.second.items())[:5]) == [
        (True, 1),
        (False, 0),
    ]
