"""A bucket from another device is copied once, and says the same."""

from types import SimpleNamespace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from sglang_fp8rl.engine.arrival.bucket import FlatBucket, TensorBucket, copied_together

CPU, ELSEWHERE = torch.device("cpu"), torch.device("meta")
TENSORS = [
    ("a", torch.arange(6, dtype=torch.float32).reshape(2, 3)),
    ("turned", torch.arange(12, dtype=torch.bfloat16).reshape(3, 4).t()),
    ("none", torch.empty(0, 4)),
    ("one", torch.tensor(3.0)),
    ("codes", torch.ones(5, 3).to(torch.float8_e4m3fn)),
]


class Transfers(TorchDispatchMode):
    """Counts what goes from one device to another."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        tensors = [one for one in (*args, result) if isinstance(one, torch.Tensor)]
        self.count += len({one.device for one in tensors}) > 1
        return result


def flat_bucket():
    flat = torch.arange(64, dtype=torch.uint8)
    one = SimpleNamespace(
        name="a", shape=torch.Size((4, 4)), dtype=torch.float32, start_idx=0, end_idx=64, numel=64
    )
    return FlatBucket(flat, [one])


@pytest.mark.parametrize("make", [flat_bucket, lambda: TensorBucket(TENSORS)])
def test_a_bucket_of_any_kind_comes_over_in_one_copy(make):
    bucket = make()
    with Transfers() as transfers:
        moved = bucket.on_device(ELSEWHERE)
    assert transfers.count == 1
    assert type(moved) is type(bucket)
    assert {one.device for _, one in moved} == {ELSEWHERE}
    assert moved.names == bucket.names
    for (_, one), (_, other) in zip(bucket, moved, strict=True):
        assert (one.shape, one.dtype) == (other.shape, other.dtype)


@pytest.mark.parametrize("make", [flat_bucket, lambda: TensorBucket(TENSORS)])
def test_a_bucket_that_is_there_already_is_left_alone(make):
    bucket = make()
    with Transfers() as transfers:
        assert bucket.on_device(CPU) is bucket
    assert transfers.count == 0


def test_only_what_lies_elsewhere_is_copied():
    mixed = [(name, tensor.to(ELSEWHERE) if name == "a" else tensor) for name, tensor in TENSORS]
    with Transfers() as transfers:
        moved = TensorBucket(mixed).on_device(ELSEWHERE)
    assert transfers.count == 1
    assert {one.device for _, one in moved} == {ELSEWHERE}
    assert next(iter(moved))[1] is mixed[0][1]


def test_what_wascopied_together_has_its_values_and_is_aligned():
    for (_, sent), copy in zip(
        TENSORS, copied_together([tensor for _, tensor in TENSORS], CPU), strict=True
    ):
        assert copy.is_contiguous()
        assert copy.data_ptr() % 16 == 0
        assert torch.equal(copy.float(), sent.float())
