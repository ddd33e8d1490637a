"""Flattened buckets whose layout says what is not so. Each is sent twice: a layout that was recorded once
would be replayed by address."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import torch

from sglang_fp8rl.wire import layout_text
from sglang_fp8rl.wire.bucket import flatten

from .fault import Group
from .trainer import DOWN, HEAD, NORM, QUERY, UP, Answer, Change, Trainer

GROUP = Group("Layouts of flattened buckets")
row = GROUP.row
INSIDE = "lies within the bucket's"
LENGTH = "as long as its shape and dtype say"
SHARED = "share bytes"


def twice(trainer: Trainer, change: Change) -> Answer:
    """A bucket of three, its layout changed, as text, as objects and as text again."""
    bucket = [trainer.fresh(name) for name in (DOWN, UP, NORM)]
    answers = [trainer.flat(bucket, change, as_text) for as_text in (True, False, True)]
    assert {answer.code for answer in answers} == {400}, answers
    return answers[-1]


def moved(number: int, start: int, end: int) -> Change:
    """Tensor `number`, each end moved by so many bytes."""

    def change(metadata: list[SimpleNamespace]) -> None:
        metadata[number].start_idx += start
        metadata[number].end_idx += end

    return change


def replaced(number: int, **values: Any) -> Change:
    def change(metadata: list[SimpleNamespace]) -> None:
        vars(metadata[number]).update(values)

    return change


@row(INSIDE, about=DOWN)
def a_tensor_that_starts_before_its_bucket(trainer: Trainer) -> Answer:
    return twice(trainer, moved(0, -16, -16))


@row(INSIDE, about=NORM)
def offsets_that_are_negative_but_a_valid_slice(trainer: Trainer) -> Answer:
    """The end of the buffer in Python, memory before it by address."""
    return twice(trainer, replaced(2, start_idx=-1024, end_idx=0))


@row(INSIDE, about=NORM)
def a_tensor_that_ends_after_its_bucket(trainer: Trainer) -> Answer:
    return twice(trainer, moved(2, 16, 16))


@row(INSIDE, about=NORM)
def a_tensor_a_terabyte_after_its_bucket(trainer: Trainer) -> Answer:
    return twice(trainer, moved(2, 1 << 40, 1 << 40))


@row(LENGTH, about=DOWN)
def a_tensor_that_ends_before_it_starts(trainer: Trainer) -> Answer:
    return twice(trainer, replaced(0, start_idx=1024, end_idx=0))


@row(LENGTH, about=DOWN)
def a_tensor_with_too_few_bytes(trainer: Trainer) -> Answer:
    return twice(trainer, moved(0, 0, -64))


@row(LENGTH, about=NORM)
def a_tensor_with_too_many_bytes(trainer: Trainer) -> Answer:
    return twice(trainer, moved(2, -64, 0))


@row(LENGTH, about=DOWN)
def a_shape_with_a_negative_side(trainer: Trainer) -> Answer:
    return twice(trainer, replaced(0, shape=torch.Size((-256, -512))))


@row(LENGTH, about=DOWN)
def a_shape_whose_product_overflows(trainer: Trainer) -> Answer:
    return twice(trainer, replaced(0, shape=torch.Size((1 << 32, 1 << 32))))


@row(LENGTH, about=DOWN)
def a_shape_that_is_larger_than_its_bytes(trainer: Trainer) -> Answer:
    return twice(trainer, replaced(0, shape=torch.Size((256, 1024))))


@row(LENGTH, about=DOWN)
def a_dtype_that_is_wider_than_its_bytes(trainer: Trainer) -> Answer:
    return twice(trainer, replaced(0, dtype=torch.int64))


@row("multiple of its element size", about=NORM)
def a_tensor_that_is_not_aligned_to_its_elements(trainer: Trainer) -> Answer:
    return twice(trainer, moved(2, -2, -2))


@row(SHARED)
def two_tensors_on_the_same_bytes(trainer: Trainer) -> Answer:
    def change(metadata: list[SimpleNamespace]) -> None:
        metadata[1].start_idx, metadata[1].end_idx = metadata[0].start_idx, metadata[0].end_idx

    return twice(trainer, change)


@row(SHARED)
def two_tensors_that_overlap_by_one_element(trainer: Trainer) -> Answer:
    return twice(trainer, moved(1, -4, -4))


@row("twice", about=UP)
def one_name_twice_in_a_bucket(trainer: Trainer) -> Answer:
    bucket = [trainer.fresh(UP), (UP, trainer.old[UP])]
    return trainer.flat(bucket)


@row("whole numbers")
def offsets_that_are_text(trainer: Trainer) -> Answer:
    return twice(trainer, replaced(0, start_idx="none"))


@row("whole numbers")
def offsets_that_are_missing(trainer: Trainer) -> Answer:
    return twice(trainer, replaced(0, start_idx=None))


@row("version 99", "JSON of version 2")
def a_layout_of_another_version(trainer: Trainer) -> Answer:
    return trainer.flat([trainer.fresh(DOWN)], lambda metadata: json.dumps({"version": 99}))


@row("it is JSON")
def a_layout_that_is_not_json(trainer: Trainer) -> Answer:
    return trainer.flat([trainer.fresh(DOWN)], lambda metadata: "{")


@row("KeyError: 'ends'")
def a_layout_with_a_column_missing(trainer: Trainer) -> Answer:
    def change(metadata: list[SimpleNamespace]) -> str:
        table = json.loads(layout_text.to_text(metadata))
        del table["ends"]
        return json.dumps(table)

    return trainer.flat([trainer.fresh(DOWN)], change)


@row("is shorter")
def a_layout_whose_columns_are_of_different_length(trainer: Trainer) -> Answer:
    def change(metadata: list[SimpleNamespace]) -> str:
        table = json.loads(layout_text.to_text(metadata))
        table["names"].append(HEAD)
        return json.dumps(table)

    return trainer.flat([trainer.fresh(DOWN)], change)


@row("float31", "known dtype")
def a_layout_with_a_dtype_that_nobody_has(trainer: Trainer) -> Answer:
    def change(metadata: list[SimpleNamespace]) -> str:
        return layout_text.to_text(metadata).replace("float32", "float31")

    return trainer.flat([trainer.fresh(DOWN)], change)


@row("empty list")
def an_empty_layout(trainer: Trainer) -> Answer:
    return trainer.flat([trainer.fresh(DOWN)], lambda metadata: [])


@row(INSIDE, about=UP)
def a_known_layout_over_a_shorter_buffer(trainer: Trainer) -> Answer:
    """The second call has the layout of the first one, which was good, and half of its bytes."""
    bucket = [(name, trainer.old[name]) for name in (DOWN, UP, QUERY)]
    assert trainer.flat(bucket).code == 200
    assert trainer.flat(bucket).code == 200
    flat, metadata = flatten(bucket)
    value = {"flattened_tensor": flat[: len(flat) // 2], "metadata": layout_text.to_text(metadata)}
    return trainer.pickled(value, "flattened_bucket")
