"""AIME-style problems from a JSON lines file or a Hugging Face dataset.

Every row is checked before the first request is sent; an error names `file:line` or the row.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import Fp8RlError

# Column names of the AIME and DAPO-Math data sets in circulation, compared in lower case.
PROBLEM_COLUMNS = ("problem", "question", "prompt", "query", "input")
ANSWER_COLUMNS = ("answer", "expected_answer", "ground_truth", "final_answer", "label", "target")
ID_COLUMNS = ("id", "problem_id", "question_id", "unique_id", "uid")


class ProblemError(Fp8RlError):
    """A data set, or a row of it, that can't be used."""


@dataclass(frozen=True)
class Problem:
    """One problem.

    Attributes:
        id: unique in its data set.
        text: the statement, or the whole user message if `verbatim`.
        answer: the reference answer, as LaTeX or a plain number.
        verbatim: the row held a chat prompt of its own, so no template is put around it.
    """

    id: str
    text: str
    answer: str
    verbatim: bool = False

    @property
    def digest(self) -> str:
        """Identifies statement and answer, so that results are never mixed with another problem."""
        content = json.dumps([self.text, self.answer, self.verbatim], ensure_ascii=True)
        return hashlib.sha256(content.encode()).hexdigest()[:16]


def load_problems(source: str, *, split: str | None = None) -> list[Problem]:
    """Read problems from `source`: a path to JSON lines, or else a Hugging Face dataset id.

    Rows that repeat a problem under the same id are merged (DAPO's AIME file holds each 32 times).

    Raises:
        ProblemError: no such file or data set, a broken or incomplete row, one id with two
            different problems, or no row at all.
    """
    path = Path(source)
    if path.is_file():
        rows = _read_json_lines(path)
    elif _looks_like_a_path(source):
        raise ProblemError(
            "--problems",
            source,
            "the file does not exist",
            "Check the path to the JSON lines file.",
        )
    else:
        rows = _read_hub_dataset(source, split)
    return _unique(((where, _to_problem(where, row)) for where, row in rows), source)


def _looks_like_a_path(source: str) -> bool:
    return source.startswith((".", "/", "~")) or source.count("/") > 1 or source.endswith(".jsonl")


def _read_json_lines(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    with path.open("rb") as file:
        for number, raw in enumerate(file, start=1):
            if not raw.strip():
                continue
            where = f"{path}:{number}"
            try:
                row = json.loads(raw)
            except ValueError as error:  # broken JSON, or bytes that are not UTF-8
                raise ProblemError(
                    where,
                    f"{error}; the line starts with {raw[:60]!r}",
                    "each line is one JSON object",
                    "Repair or delete the line; nothing was sent.",
                ) from error
            if not isinstance(row, dict):
                raise ProblemError(
                    where,
                    f"a JSON {type(row).__name__}",
                    "each line is one JSON object",
                    'Write one {"problem": ..., "answer": ...} per line; nothing was sent.',
                )
            yield where, row


def _read_hub_dataset(name: str, split: str | None) -> Iterator[tuple[str, dict[str, Any]]]:
    try:
        import datasets
    except ImportError as error:
        raise ProblemError(
            "--problems",
            name,
            "a Hugging Face dataset needs the package `datasets`",
            'Install "sglang-fp8rl[eval]", or pass a JSON lines file.',
        ) from error
    try:
        found = datasets.load_dataset(name)
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        # OSError: unreachable, offline mode, unknown id. ValueError: it has several configurations.
        raise ProblemError(
            "--problems",
            f"{name!r} ({type(error).__name__}: {error})",
            "it is neither a file here nor a dataset that could be loaded",
            "Check the spelling and the network, or pass a JSON lines file.",
        ) from error
    splits = list(found)
    if split is None and len(splits) > 1:
        raise ProblemError(
            "--split", "not given", f"{name} has the splits {splits}", "Choose one of them."
        )
    chosen = split or splits[0]
    if chosen not in splits:
        raise ProblemError("--split", chosen, f"{name} has the splits {splits}", "Choose another.")
    for number, row in enumerate(found[chosen]):
        yield f"{name}[{chosen}][{number}]", row


def _to_problem(where: str, row: dict[str, Any]) -> Problem:
    columns = {str(name).lower(): value for name, value in row.items()}
    found = _first(columns, PROBLEM_COLUMNS)
    if found is None:
        raise _missing(where, row, "problem", PROBLEM_COLUMNS)
    verbatim = not isinstance(found, str)
    text = _user_message(where, found) if verbatim else found
    answer = _first(columns, ANSWER_COLUMNS)
    if answer is None and isinstance(columns.get("reward_model"), dict):  # DAPO's layout
        answer = columns["reward_model"].get("ground_truth")
    if answer is None:
        raise _missing(where, row, "answer", ANSWER_COLUMNS)
    identity = _first(columns, ID_COLUMNS)
    if identity is None and isinstance(columns.get("extra_info"), dict):
        identity = columns["extra_info"].get("index")
    if not text.strip():
        raise ProblemError(where, "an empty problem", "a row states a problem", "Delete the row.")
    # Without an id, the statement itself is the identity: stable when rows move.
    name = hashlib.sha256(text.encode()).hexdigest()[:12] if identity is None else str(identity)
    return Problem(name, text, _answer_text(where, answer), verbatim)


def _first(columns: dict[str, Any], names: tuple[str, ...]) -> Any:
    return next((columns[name] for name in names if columns.get(name) is not None), None)


def _user_message(where: str, messages: Any) -> str:
    contents = (
        [m.get("content") for m in messages if isinstance(m, dict) and m.get("role") == "user"]
        if isinstance(messages, list)
        else []
    )
    if len(contents) != 1 or not isinstance(contents[0], str):
        raise ProblemError(
            where,
            f"a prompt of type {type(messages).__name__} with {len(contents)} user messages",
            "a prompt is a text, or chat messages with one from the user",
            "Give the statement in a column `problem`.",
        )
    return contents[0]


def _answer_text(where: str, answer: Any) -> str:
    if isinstance(answer, list) and len(answer) == 1:
        answer = answer[0]
    if isinstance(answer, float) and answer.is_integer():  # 204.0, from a table with gaps
        answer = int(answer)
    if isinstance(answer, bool) or not isinstance(answer, (str, int)) or not str(answer).strip():
        raise ProblemError(
            where,
            f"answer {answer!r}",
            "an answer is a number or a LaTeX text",
            "Repair the row; nothing was sent.",
        )
    return str(answer).strip()


def _missing(where: str, row: dict[str, Any], what: str, names: tuple[str, ...]) -> ProblemError:
    return ProblemError(
        where,
        f"columns {sorted(row)}",
        f"a row has its {what} in one of {', '.join(names)}",
        "Rename the column; nothing was sent.",
    )


def _unique(found: Iterable[tuple[str, Problem]], source: str) -> list[Problem]:
    problems: dict[str, Problem] = {}
    for where, problem in found:
        if problems.setdefault(problem.id, problem) != problem:
            raise ProblemError(
                where,
                f"id {problem.id!r}",
                "an id stands for one problem, and an earlier row has another under it",
                "Make the ids unique; nothing was sent.",
            )
    if not problems:
        raise ProblemError("--problems", source, "it holds no problem", "Add at least one row.")
    return list(problems.values())
