"""What a client says of its refit travels as text, and can't be misread."""

import json

import pytest

from sglang_fp8rl.errors import RefitError
from sglang_fp8rl.wire.refit_note import KEY, RefitNote, note_of

NOTES = (
    RefitNote("a"),
    RefitNote("a", "step-1", extent="all"),
    RefitNote("a", extent="partial"),
    RefitNote("a", "step-1"),
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
     {"id": "a", "version": 7}, {"id": "a", "extent": {"names": [1]}}, {"id": "a", "Extent": "all"}],
    ids=str,
)  # fmt: skip
def test_a_note_that_cannot_be_read_is_refused(content):
    with pytest.raises(RefitError, match="a note is"):
        note_of(json.dumps({KEY: content}))


def test_a_note_that_is_nested_too_deep_is_refused():
    rid = '{"' + KEY + '": ' + "[" * 100_000 + "]" * 100_000 + "}"
    with pytest.raises(RefitError, match="RecursionError"):
        note_of(rid)


@pytest.mark.parametrize("texts", [(7,), ("a", 0), ("a", b"1")], ids=str)
def test_a_note_of_anything_but_text_is_refused_where_it_is_made(texts):
    with pytest.raises(RefitError, match=r"Pass weight_version=str\(step\)"):
        RefitNote(*texts)


@pytest.mark.parametrize("field", ["id", "version"])
def test_a_note_with_half_a_character_is_refused_in_words_that_can_be_sent(field):
    rid = json.dumps({KEY: {"id": "a", field: "a\ud800"}})
    with pytest.raises(RefitError, match="a note is") as refused:
        note_of(rid)
    str(refused.value).encode()
