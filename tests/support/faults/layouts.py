"""Flattened buckets whose layout says what is not so. Each is sent twice: a layout that was recorded once
would be replayed by address."""

from __future__ import annotations

import json
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

from sglang_fp8rl.lab.testing.layouts import to_text
from sglang_fp8rl.wire.bucket import Bucket

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


def changed(word: str, told: str, about: str, change: Change) -> None:
    """A row for a bucket whose layout was changed."""
    row(told, about=about, word=word)(lambda trainer: twice(trainer, change))


changed("a_tensor_that_starts_before_its_bucket", INSIDE, DOWN, moved(0, -16, -16))
# The end of the buffer in Python, memory before it by address.
changed(
    "offsets_that_are_negative_but_a_valid_slice",
    INSIDE,
    NORM,
    replaced(2, start_idx=-1024, end_idx=0),
)
changed("a_tensor_that_ends_after_its_bucket", INSIDE, NORM, moved(2, 16, 16))
changed("a_tensor_a_terabyte_after_its_bucket", INSIDE, NORM, moved(2, 1 << 40, 1 << 40))
changed("a_tensor_that_ends_before_it_starts", LENGTH, DOWN, replaced(0, start_idx=1024, end_idx=0))
changed("a_tensor_with_too_few_bytes", LENGTH, DOWN, moved(0, 0, -64))
changed("a_tensor_with_too_many_bytes", LENGTH, NORM, moved(2, -64, 0))
for word, shape in (
    ("a_shape_with_a_negative_side", (-256, -512)),
    ("a_shape_whose_product_overflows", (1 << 32, 1 << 32)),
    ("a_shape_that_is_larger_than_its_bytes", (256, 1024)),
):
    changed(word, LENGTH, DOWN, replaced(0, shape=torch.Size(shape)))
changed("a_dtype_that_is_wider_than_its_bytes", LENGTH, DOWN, replaced(0, dtype=torch.int64))
changed(
    "a_tensor_that_is_not_aligned_to_its_elements",
    "multiple of its element size",
    NORM,
    moved(2, -2, -2),
)


@row(SHARED)
def two_tensors_on_the_same_bytes(trainer: Trainer) -> Answer:
    def change(metadata: list[SimpleNamespace]) -> None:
        metadata[1].start_idx, metadata[1].end_idx = metadata[0].start_idx, metadata[0].end_idx

    return twice(trainer, change)


changed("two_tensors_that_overlap_by_one_element", SHARED, "", moved(1, -4, -4))


@row("twice", about=UP)
def one_name_twice_in_a_bucket(trainer: Trainer) -> Answer:
    bucket = [trainer.fresh(UP), (UP, trainer.old[UP])]
    return trainer.flat(bucket)


changed("offsets_that_are_text", "whole numbers", "", replaced(0, start_idx="none"))
changed("offsets_that_are_missing", "whole numbers", "", replaced(0, start_idx=None))


def written(word: str, *told: str, change: Callable[[str], Any]) -> None:
    """A row for a bucket of one tensor, whose layout is made of the text that it had."""
    row(*told, word=word)(
        lambda trainer: trainer.flat(
            [trainer.fresh(DOWN)], lambda metadata: change(to_text(metadata))
        )
    )


def with_columns(text: str, change: Callable[[dict[str, Any]], Any]) -> str:
    table = json.loads(text)
    change(table)
    return json.dumps(table)


written(
    "a_layout_of_another_version",
    "version 99",
    "JSON of version 2",
    change=lambda text: json.dumps({"version": 99}),
)
written("a_layout_that_is_not_json", "it is JSON", change=lambda text: "{")
written(
    "a_layout_with_a_column_missing",
    "KeyError: 'ends'",
    change=lambda text: with_columns(text, lambda table: table.pop("ends")),
)
written(
    "a_layout_whose_columns_are_of_different_length",
    "is shorter",
    change=lambda text: with_columns(text, lambda table: table["names"].append(HEAD)),
)
written(
    "a_layout_with_a_dtype_that_nobody_has",
    "float31",
    "known dtype",
    change=lambda text: text.replace("float32", "float31"),
)
written("an_empty_layout", "empty list", change=lambda text: [])


@row(INSIDE, about=UP)
def a_known_layout_over_a_shorter_buffer(trainer: Trainer) -> Answer:
    """The second call has the layout of the first one, which was good, and half of its bytes."""
    bucket = [(name, trainer.old[name]) for name in (DOWN, UP, QUERY)]
    assert trainer.flat(bucket).code == 200
    assert trainer.flat(bucket).code == 200
    filled = Bucket.of(bucket)
    flat, metadata = filled.flat, filled.metadata
    value = {"flattened_tensor": flat[: len(flat) // 2], "metadata": to_text(metadata)}
    return trainer.pickled(value, "flattened_bucket")
