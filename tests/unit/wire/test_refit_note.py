"""What a client says of its refit travels as text, and can't be misread."""

import json

import pytest
import torch

from sglang_fp8rl.errors import RefitError
from sglang_fp8rl.wire.refit_note import KEY, RefitNote, layout_digest, note_of

NOTES = (
    RefitNote("a"),
    RefitNote("a", "step-1", wants_all=True),
    RefitNote("a", is_partial=True),
    RefitNote("a", names=("x", "y"), digest="00"),
    RefitNote("a", names=(), is_partial=True),
)


@pytest.mark.parametrize("note", NOTES, ids=str)
def test_a_note_is_read_as_it_was_written(note):
    assert note_of(note.to_text()) == note


@pytest.mark.parametrize("rid", [None, "", "some request", "{", '{"other": 1}', ["a", "b"]])
def test_any_other_rid_is_no_note(rid):
    assert note_of(rid) is None


@pytest.mark.parametrize(
    "content",
    [{}, {"id": 3}, [], {"id": "a", "extent": "some"}, {"id": "a", "extent": {"name": []}},
     {"id": "a", "version": 7}, {"id": "a", "extent": {"names": [1]}}],
    ids=str,
)  # fmt: skip
def test_a_note_that_cannot_be_read_is_refused(content):
    with pytest.raises(RefitError, match="a note is"):
        note_of(json.dumps({KEY: content}))


def test_the_digest_depends_on_names_dtypes_and_shapes_and_not_on_the_order():
    rows = [("a", torch.float32, (2, 3)), ("b", torch.bfloat16, (3,))]
    digest = layout_digest(rows)
    assert layout_digest(rows[::-1]) == digest
    others = [
        ("c", torch.float32, (2, 3)),
        ("a", torch.float16, (2, 3)),
        ("a", torch.float32, (3, 2)),
    ]
    assert all(layout_digest([other, rows[1]]) != digest for other in others)
