"""A sender on another device costs one copy of its bucket; replay goes on."""

import pytest
import torch
from support.engine.commands import digests, model_of, status
from support.engine.pool import on

pytestmark = pytest.mark.engine


def send_from_elsewhere(scheduler, named_tensors, is_elsewhere):
    """One flattened bucket; returns the copies that were made of it.

    Its tensor says that it lies on another device, has no memory of its own, and gives its values
    away only by `.to(device)`.
    """
    from sglang_fp8rl.engine.arrival.bucket import FlatBucket
    from sglang_fp8rl.engine.arrival.update import Origin, Update
    from sglang_fp8rl.wire.bucket import Bucket

    copies = []

    class Elsewhere(torch.Tensor):
        @staticmethod
        def __new__(cls, values):
            return torch.Tensor._make_wrapper_subclass(
                cls, values.shape, dtype=values.dtype, device="meta"
            )

        @classmethod
        def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
            assert func is torch.ops.aten._to_copy.default, func
            copies.append(torch.device(kwargs["device"]))
            return flat.clone()

    filled = Bucket.of(named_tensors)
    flat, metadata = filled.flat, filled.metadata
    model = model_of(scheduler)
    with model.fp8rl_refit.during(Update(Origin.TENSOR)):
        model.load_weights(FlatBucket(Elsewhere(flat) if is_elsewhere else flat, metadata))
    return copies


@on("qwen3-tp1")
def test_a_sender_on_another_device_is_copied_once_and_replayed_by_the_recipe_of_any_other(host):
    first, second = (list(state.items()) for state in (host.model.first, host.model.second))
    assert host.call(send_from_elsewhere, first, False) == []
    before = host.call(status)["replay"]
    assert host.call(send_from_elsewhere, second, True) == [torch.device("cpu")]
    after = host.call(status)["replay"]
    assert host.call_all(digests) == host.fresh("second").digests
    assert after["calls"] == before["calls"] + 1
    assert after["recipes"] == before["recipes"]
    assert after["native_tensors"] == before["native_tensors"]
