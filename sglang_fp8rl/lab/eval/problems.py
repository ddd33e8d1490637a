"""Problems with a reference answer, from JSON lines or a Hugging Face dataset, as Inspect samples.

Every row is read before the first request is sent.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...errors import EvaluationError

if TYPE_CHECKING:
    from inspect_ai.dataset import Sample

# Column names of the AIME data sets in circulation, compared in lower case.
PROBLEM_COLUMNS = ("problem", "question")
ANSWER_COLUMNS = ("answer", "expected_answer")


def load_problems(source: str, split: str, template: str) -> list[Sample]:
    """Read problems from `source`: a path to JSON lines, or else a Hugging Face dataset id.

    Raises:
        EvaluationError: nothing there, a broken or incomplete row, an id that comes twice, or no row at all.
    """
    from inspect_ai.dataset import hf_dataset, json_dataset

    rows = 0

    def to_sample(row: dict[str, Any]) -> Sample:
        nonlocal rows
        rows += 1
        return _to_sample(f"{source}, row {rows}", rows, row, template)

    try:
        if Path(source).exists() or source.endswith(".jsonl"):
            samples = list(json_dataset(source, to_sample))
        else:
            samples = list(hf_dataset(source, split=split, sample_fields=to_sample))
    except (OSError, ValueError, AttributeError) as error:  # unreachable; broken JSON, no object
        raise EvaluationError(
            "--problems",
            f"{source!r}, after {rows} rows: {type(error).__name__}: {error}",
            "it has to be a .jsonl file of JSON objects, one a line, or a dataset that can be loaded",
            "Check the path or the dataset's id, and --split; nothing was sent.",
        ) from error
    ids = [sample.id for sample in samples]
    twice = {one for one in ids if ids.count(one) > 1}
    if twice or not ids:
        raise EvaluationError(
            "--problems",
            f"{source!r}: {len(ids)} rows, ids that come twice: {sorted(map(str, twice))}",
            "it has to hold problems, each under an id of its own",
            "Repair the rows; nothing was sent.",
        )
    return samples


def digest(samples: Sequence[Sample]) -> str:
    """Identifies prompts and answers, so that a log is never continued with other problems."""
    content = [[sample.id, sample.input, sample.target] for sample in samples]
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:16]


def _to_sample(where: str, number: int, row: dict[str, Any], template: str) -> Sample:
    from inspect_ai.dataset import Sample

    columns = {str(name).lower(): value for name, value in row.items()}
    statement, answer = (
        next((columns[name] for name in names if columns.get(name) is not None), None)
        for names in (PROBLEM_COLUMNS, ANSWER_COLUMNS)
    )
    if isinstance(answer, float) and answer.is_integer():  # 204.0, from a table with gaps
        answer = int(answer)
    good_answer = isinstance(answer, (str, int)) and not isinstance(answer, bool)
    if not isinstance(statement, str) or not statement.strip() or not good_answer:
        raise EvaluationError(
            where,
            f"columns {sorted(row)}, answer {answer!r}",
            f"a row has a text in one of {', '.join(PROBLEM_COLUMNS)} and an integer, or LaTeX as text, in one "
            f"of {', '.join(ANSWER_COLUMNS)}",
            "Rename the columns or repair the row; nothing was sent.",
        )
    name = columns.get("id")
    return Sample(
        id=str(number if name is None else name),
        input=template.format(problem=statement),
        target=str(answer).strip(),
    )
