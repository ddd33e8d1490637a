"""The results file: what survives an interruption, and what is refused."""

from __future__ import annotations

import json

import pytest

from sglang_fp8rl.eval.results import ResultsError, ResultsFile

RECORD = {"status": "correct", "finish_reason": "stop", "text": "é\n\u2028\ud800", "tokens": 3}
SETTINGS = {"temperature": 1.0, "served": {"model": "m", "quantization": "fp8"}}


@pytest.fixture
def path(tmp_path):
    return tmp_path / "deep" / "results.jsonl"


def fill(path, count=3):
    with ResultsFile(path) as results:
        results.begin_session("http://a", SETTINGS)
        for index in range(count):
            results.add(("p", index, "http://a"), "d", RECORD)


def test_what_was_added_is_found_again(path):
    fill(path)
    with ResultsFile(path) as results:
        found = results.find(("p", 2, "http://a"), "d")
        assert {name: found[name] for name in RECORD} == RECORD
        assert results.find(("p", 3, "http://a"), "d") is None
        assert results.find(("p", 2, "http://b"), "d") is None
        results.begin_session("http://a", SETTINGS)
    assert len(path.read_bytes().splitlines()) == 4  # the same session is not written again


def test_a_line_torn_at_any_byte_costs_only_itself(path):
    fill(path)
    whole = path.read_bytes()
    before_last = whole[:-1].rindex(b"\n") + 1
    for cut in range(before_last + 1, len(whole) - 1, 7):
        path.write_bytes(whole[:cut])
        with ResultsFile(path) as results:
            assert sorted(results.samples) == [("p", 0, "http://a"), ("p", 1, "http://a")]
            assert len(results.notes) == 1
            assert "torn" in results.notes[0]
            results.add(("p", 2, "http://a"), "d", RECORD)
        assert path.read_bytes() == whole


def test_a_whole_line_without_its_end_is_kept(path):
    fill(path)
    whole = path.read_bytes()
    path.write_bytes(whole[:-1])
    with ResultsFile(path) as results:
        assert len(results.samples) == 3
        assert results.notes == []
    assert path.read_bytes() == whole


@pytest.mark.parametrize(
    "broken",
    [b'{"kind": "sam', b"", b"[]", b"7", b'{"kind": "else"}', b'{"kind": "sample"}', b"\xff"],
)
def test_a_broken_line_before_the_last_is_named_and_nothing_is_changed(path, broken):
    fill(path)
    lines = path.read_bytes().splitlines(keepends=True)
    lines[1] = broken + b"\n"
    path.write_bytes(b"".join(lines))
    with pytest.raises(ResultsError, match=r"results.jsonl:2: .*Delete that line"):
        ResultsFile(path)
    assert path.read_bytes() == b"".join(lines)


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"temperature": 0.6}, "temperature was 1.0, is 0.6"),
        ({"served": {"model": "m", "quantization": None}}, "served was .*'fp8'.* is .*None"),
        ({"top_p": 0.5}, "top_p was None, is 0.5"),
    ],
)
def test_settings_are_not_mixed_under_one_endpoint(path, changed, told):
    fill(path)
    with ResultsFile(path) as results:
        with pytest.raises(ResultsError, match=told):
            results.begin_session("http://a", SETTINGS | changed)
        results.begin_session("http://b", SETTINGS | changed)


def test_settings_may_change_while_there_is_no_sample(path):
    # A first request that was refused (say, too many tokens) must not spoil the file.
    fill(path, count=0)
    with ResultsFile(path) as results:
        results.begin_session("http://a", SETTINGS | {"temperature": 0.6})
        results.add(("p", 0, "http://a"), "d", RECORD)
        with pytest.raises(ResultsError, match=r"temperature was 0.6, is 1.0"):
            results.begin_session("http://a", SETTINGS)


def test_samples_of_another_problem_with_the_same_id_are_refused(path):
    fill(path)
    with (
        ResultsFile(path) as results,
        pytest.raises(ResultsError, match="problem 'p': its statement or answer differs"),
    ):
        results.find(("p", 0, "http://a"), "other digest")


def test_two_runs_do_not_share_a_file(path):
    with ResultsFile(path), pytest.raises(ResultsError, match="locked by another process"):
        ResultsFile(path)
    ResultsFile(path).__exit__()


def test_an_unwritable_place_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ResultsError, match="results are appended to this file"):
        ResultsFile(tmp_path / "file" / "results.jsonl")


def test_each_record_is_one_line_whatever_the_text_holds(path):
    fill(path)
    for line in path.read_text().splitlines():
        json.loads(line)
