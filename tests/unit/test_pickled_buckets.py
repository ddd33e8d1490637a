"""A bucket told by its bytes is the bucket that unpickling gives, whatever was sent before.

Payloads are made by SGLang's own serializer; what no client of SGLang sends is made by hand.
"""

from __future__ import annotations

import copy
import pickle
from dataclasses import replace
from typing import Any

import pytest
import torch
from sglang.srt.utils import MultiprocessingSerializer
from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorBucket, FlattenedTensorMetadata

from sglang_fp8rl.engine import pickled_buckets
from sglang_fp8rl.engine.pickled_buckets import PickledBuckets

UNPICKLE = MultiprocessingSerializer.deserialize


def bucket(seed: int, count: int = 100, prefix: str = "model.layers") -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    tensors = [
        (f"{prefix}.{i}.mlp.up_proj.weight", torch.randn(3, 2 + i % 5, generator=generator))
        for i in range(count)
    ]
    made = FlattenedTensorBucket(named_tensors=tensors)
    return {"flattened_tensor": made.get_flattened_tensor(), "metadata": made.get_metadata()}


class Counted:
    """SGLang's unpickler, and the size of what it was given."""

    def __init__(self) -> None:
        self.sizes: list[int] = []

    def __call__(self, data: Any) -> Any:
        self.sizes.append(len(data))
        return UNPICKLE(data)


def assert_same(payload: dict[str, Any], sent: dict[str, Any]) -> None:
    assert payload.keys() == sent.keys()
    assert torch.equal(payload["flattened_tensor"], sent["flattened_tensor"])
    assert list(payload["metadata"]) == list(sent["metadata"])


def test_a_second_bucket_of_the_layout_is_known_and_has_its_own_values():
    known, original = PickledBuckets(), Counted()
    first, second = bucket(1), bucket(2)
    data = [MultiprocessingSerializer.serialize(one) for one in (first, second)]
    one = known.deserialize(original, data[0])
    two = known.deserialize(original, data[1])
    assert_same(one, first)
    assert_same(two, second)
    assert two["metadata"] is one["metadata"]
    assert original.sizes[0] == len(data[0])
    assert original.sizes[1] < 1000


def test_base64_is_read_as_sglang_reads_it():
    known, original = PickledBuckets(), Counted()
    for seed in (1, 2):
        sent = bucket(seed)
        data = MultiprocessingSerializer.serialize(sent, output_str=True)
        assert_same(known.deserialize(original, data), sent)
    assert original.sizes[1] < 1000


def test_tensors_of_other_sizes_and_frames_of_other_lengths_are_read_right():
    known = PickledBuckets()
    for count in (3000, 100, 3000, 99, 1, 3000, 100):
        sent = bucket(count, count)
        data = MultiprocessingSerializer.serialize(sent)
        assert_same(known.deserialize(UNPICKLE, data), sent)


CHANGES = {
    "name": lambda one: replace(one, name=one.name.replace("up", "op")),
    "shape": lambda one: replace(one, shape=torch.Size(reversed(one.shape))),
    "dtype": lambda one: replace(one, dtype=torch.int32),
    "start": lambda one: replace(one, start_idx=one.start_idx + 4),
    "end": lambda one: replace(one, end_idx=one.end_idx - 4),
}


@pytest.mark.parametrize("position", [0, 57, 99])
@pytest.mark.parametrize("change", CHANGES)
def test_a_layout_that_differs_in_one_attribute_is_another(change, position):
    known = PickledBuckets()
    sent = bucket(1)
    known.deserialize(UNPICKLE, MultiprocessingSerializer.serialize(sent))
    other = bucket(2)
    other["metadata"][position] = CHANGES[change](other["metadata"][position])
    for one in (other, sent, other):
        data = MultiprocessingSerializer.serialize(one)
        assert_same(known.deserialize(UNPICKLE, data), one)


def pickled(payload: Any) -> bytes:
    """Without handles of shared memory: equal objects are equal bytes."""
    return pickle.dumps(payload, protocol=4)


def metadata(count: int = 100, **changes: Any) -> list[Any]:
    one = FlattenedTensorMetadata("w", torch.Size([2]), torch.uint8, 0, 2, 2)
    return [replace(one, name=f"model.layers.{i}", **changes) for i in range(count)]


def test_a_tail_that_uses_the_tensors_own_objects_is_never_cut():
    """Equal tails, but the shape that they take from the head differs."""
    known = PickledBuckets()
    for size in (2, 3):
        shape = torch.Size([size])
        sent = {"flattened_tensor": shape, "metadata": metadata(shape=shape)}
        assert known.deserialize(pickle.loads, pickled(sent)) == sent
    assert len(known) == 0


def test_a_tensor_sent_behind_its_metadata_is_never_taken_from_the_last_bucket():
    known = PickledBuckets()
    for value in (1, 2):
        sent = {"metadata": metadata(), "flattened_tensor": value}
        assert known.deserialize(pickle.loads, pickled(sent)) == sent
    assert len(known) == 0


def test_a_key_called_metadata_inside_the_tensor_is_not_the_cut():
    known = PickledBuckets()
    for value in (1, 2):
        inner = {"metadata": value, "more": list(range(5000))}
        sent = {"flattened_tensor": inner, "metadata": metadata()}
        assert known.deserialize(pickle.loads, pickled(sent)) == sent
    assert len(known) == 0


def test_strings_of_the_head_are_part_of_the_layout():
    known = PickledBuckets()
    for text in ("one", "two", "one"):
        sent = {"flattened_tensor": text, "metadata": metadata(dtype=text)}
        found = known.deserialize(pickle.loads, pickled(sent))
        assert found["flattened_tensor"] == text
        assert found["metadata"][5].dtype == text


@pytest.mark.parametrize("value", [1.5, [1]], ids=str)
def test_metadata_that_carries_more_than_plain_values_is_unpickled_each_time(value):
    known = PickledBuckets()
    for _ in range(2):
        sent = {"flattened_tensor": 0, "metadata": metadata(numel=value)}
        assert known.deserialize(pickle.loads, pickled(sent)) == sent
    assert len(known) == 0


@pytest.mark.parametrize(
    "sent", [[("w", 1)] * 3000, {"flattened_tensor": 1}, {"metadata": []}, "x" * 9000], ids=str
)
def test_what_is_no_flattened_bucket_is_left_to_sglang(sent):
    known = PickledBuckets()
    for _ in range(2):
        assert known.deserialize(pickle.loads, pickled(sent)) == sent
    assert len(known) == 0


def test_a_truncated_payload_fails_as_it_does_in_sglang():
    known, original = PickledBuckets(), Counted()
    sent = pickled({"flattened_tensor": 7, "metadata": metadata()})
    known.deserialize(pickle.loads, sent)
    for cut in (1, 40, len(sent) // 2):
        with pytest.raises((EOFError, pickle.UnpicklingError)):
            known.deserialize(pickle.loads, sent[:-cut])
    assert original.sizes == []


def test_few_layouts_are_kept_the_last_used_ones(monkeypatch):
    size = len(pickled(metadata()))
    monkeypatch.setattr(pickled_buckets, "MAX_BYTES", 3 * size)
    known = PickledBuckets()
    sent = [{"flattened_tensor": i, "metadata": metadata(start_idx=i)} for i in range(6)]
    for one in sent:
        assert known.deserialize(pickle.loads, pickled(one)) == {
            **one,
            "metadata": tuple(one["metadata"]),
        }
        known.deserialize(pickle.loads, pickled(sent[0]))
    assert known.nbytes <= 3 * size
    assert 2 <= len(known) <= 3
    before = [copy.copy(entry.tail) for entry in known._known]
    assert known.deserialize(pickle.loads, pickled(sent[0]))["flattened_tensor"] == 0
    assert [entry.tail for entry in known._known] == before
