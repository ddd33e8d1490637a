"""Data sets: the layouts in circulation are read, every broken one is named before use."""

from __future__ import annotations

import json
import sys
import types

import pytest

from sglang_fp8rl.eval.problems import Problem, ProblemError, load_problems


def write(path, *rows):
    lines = [row if isinstance(row, bytes) else json.dumps(row).encode() for row in rows]
    path.write_bytes(b"\n".join(lines) + b"\n")
    return str(path)


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"id": 60, "problem": "P", "answer": "204"}, Problem("60", "P", "204")),
        (
            {"ID": "2024-I-1", "Problem": "P", "Solution": "s", "Answer": 204},
            Problem("2024-I-1", "P", "204"),
        ),
        ({"question": "P", "answer": " 033 ", "id": "a"}, Problem("a", "P", "033")),
        ({"problem": "P", "answer": 204.0, "id": 0}, Problem("0", "P", "204")),
        ({"prompt": "P", "expected_answer": ["7"], "uid": "u"}, Problem("u", "P", "7")),
        (
            {
                "prompt": [{"role": "user", "content": "Solve P."}],
                "reward_model": {"ground_truth": "204", "style": "rule"},
                "extra_info": {"index": 12},
            },
            Problem("12", "Solve P.", "204", verbatim=True),
        ),
    ],
)
def test_known_layouts_are_read(tmp_path, row, expected):
    assert load_problems(write(tmp_path / "p.jsonl", row)) == [expected]


def test_problems_without_an_id_keep_their_name_when_rows_move(tmp_path):
    rows = [{"problem": f"P{i}", "answer": i} for i in range(5)]
    forward = load_problems(write(tmp_path / "a.jsonl", *rows))
    backward = load_problems(write(tmp_path / "b.jsonl", *rows[::-1]))
    assert forward == backward[::-1]
    assert len({problem.id for problem in forward}) == 5


def test_repeated_rows_are_one_problem(tmp_path):
    row = {"id": 1, "problem": "P", "answer": "2"}
    assert len(load_problems(write(tmp_path / "p.jsonl", row, row, row))) == 1


def test_digest_changes_with_statement_and_answer():
    problems = [Problem("1", "P", "2"), Problem("1", "P", "3"), Problem("1", "Q", "2")]
    assert len({problem.digest for problem in problems}) == 3
    assert problems[0].digest == Problem("other name", "P", "2").digest


GOOD = {"id": 1, "problem": "P", "answer": "2"}


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (
            b'{"problem": "P", "answer": ',
            r"p.jsonl:3: .*Repair or delete the line; nothing was sent",
        ),
        (b'{"problem": "\xff\xfe"}', r"p.jsonl:3: .*codec can't decode"),
        (b"[1, 2]", r"p.jsonl:3: a JSON list"),
        (b"NaN", r"p.jsonl:3: a JSON float"),
        (
            {"id": 2, "answer": "2"},
            r"p.jsonl:3: columns \['answer', 'id'\]; a row has its problem in",
        ),
        ({"id": 2, "problem": "Q"}, r"p.jsonl:3: columns .* a row has its answer in one of answer"),
        ({"id": 2, "problem": " ", "answer": "2"}, r"p.jsonl:3: an empty problem"),
        ({"id": 2, "problem": "Q", "answer": ""}, r"p.jsonl:3: answer ''"),
        ({"id": 2, "problem": "Q", "answer": True}, r"p.jsonl:3: answer True"),
        ({"id": 2, "problem": "Q", "answer": ["1", "2"]}, r"p.jsonl:3: answer \['1', '2'\]"),
        ({"id": 2, "problem": "Q", "answer": float("nan")}, r"p.jsonl:3: answer nan"),
        ({"id": 2, "prompt": [{"role": "system", "content": "x"}], "answer": 1}, "0 user messages"),
        ({"id": 2, "prompt": {"text": "Q"}, "answer": 1}, "a prompt of type dict"),
        ({"id": 1, "problem": "Q", "answer": "2"}, r"p.jsonl:3: id '1'; an id stands for one"),
    ],
)
def test_a_bad_row_is_named_with_its_line(tmp_path, bad, message):
    with pytest.raises(ProblemError, match=message):
        load_problems(write(tmp_path / "p.jsonl", GOOD, b"", bad, GOOD))


@pytest.mark.parametrize("name", ["missing.jsonl", "./missing", "/no/such/file", "a/b/c"])
def test_a_missing_file_is_not_taken_for_a_dataset(name):
    with pytest.raises(ProblemError, match="the file does not exist"):
        load_problems(name)


def test_an_empty_file_is_refused(tmp_path):
    with pytest.raises(ProblemError, match="it holds no problem"):
        load_problems(write(tmp_path / "p.jsonl", b""))


@pytest.fixture
def hub(monkeypatch):
    """A stand-in for the `datasets` package whose `load_dataset` a test sets."""
    module = types.ModuleType("datasets")
    module.exceptions = types.SimpleNamespace(DatasetsError=RuntimeError)
    monkeypatch.setitem(sys.modules, "datasets", module)
    return module


def test_the_only_split_of_a_dataset_is_read(hub):
    hub.load_dataset = lambda name: {"train": [GOOD]}
    assert load_problems("org/aime") == [Problem("1", "P", "2")]


def test_one_of_several_splits_has_to_be_chosen(hub):
    hub.load_dataset = lambda name: {"train": [], "test": [GOOD]}
    with pytest.raises(ProblemError, match=r"org/aime has the splits \['train', 'test'\]"):
        load_problems("org/aime")
    with pytest.raises(ProblemError, match="--split: validation"):
        load_problems("org/aime", split="validation")
    assert len(load_problems("org/aime", split="test")) == 1


def test_a_bad_row_of_a_dataset_is_named(hub):
    hub.load_dataset = lambda name: {"test": [GOOD, {"id": 3}]}
    with pytest.raises(ProblemError, match=r"org/aime\[test\]\[1\]"):
        load_problems("org/aime")


def test_being_offline_is_an_error_with_a_remedy(monkeypatch):
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ProblemError, match=r"ConnectionError.*or pass a JSON lines file"):
        load_problems("no-such-org/no-such-set")
