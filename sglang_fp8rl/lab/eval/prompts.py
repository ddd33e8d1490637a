"""Prompts as token ids: from a file, from built-in texts, or random when nothing can be read."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from ...errors import EvaluationError

BUILT_IN = (
    "Find the remainder when 7 to the power of 2024 is divided by 100. Think step by step.",
    "A fair coin is tossed ten times. What is the probability of exactly four heads?",
    "Write a Python function that merges two sorted lists without using the built-in sort.",
    "Explain to a child why the sky is blue in the daytime and red in the evening.",
    "The old lighthouse keeper opened the letter, read the first line, and",
    "Translate into French: The train to the coast leaves at a quarter past nine.",
    "List three differences between a virus and a bacterium.",
    "Let n be a positive integer such that n squared plus n plus 1 is divisible by 7. Then",
)
_RANDOM = (16, 32)  # prompts, and tokens of each


def load_prompts(path: Path | None, tokenizer: Any | None, vocabulary: int) -> list[list[int]]:
    """Return prompts as token ids.

    Args:
        path: a text file with a prompt per line, or JSON lines with `prompt` (text) or `input_ids`;
            None for the built-in texts, or seeded random tokens where there is no tokenizer.
        tokenizer: of the served model, if it has one.
        vocabulary: number of token ids.

    Raises:
        EvaluationError: an unreadable file or line, text without a tokenizer, a token that the model has not, or
            no prompt at all.
    """
    if path is None and tokenizer is None:
        generator = torch.Generator().manual_seed(0)
        return torch.randint(vocabulary, _RANDOM, generator=generator).tolist()
    lines = [("built-in prompt", text) for text in BUILT_IN] if path is None else prompt_lines(path)
    is_json, prompts = path is not None and path.suffix == ".jsonl", []
    for where, line in lines:
        prompts.append(_ids(where, _parsed(where, line) if is_json else line, tokenizer))
        check_ids(where, prompts[-1], vocabulary)
    return prompts


def check_ids(subject: str, ids: Sequence[int], vocabulary: int) -> None:
    """Raise `EvaluationError` unless the model has all these tokens."""
    if max(ids) >= vocabulary:
        raise EvaluationError(
            subject,
            f"token id {max(ids)}",
            f"the model's vocabulary has {vocabulary} entries",
            "Pass the --model that is served, and ids of its own tokenizer.",
        )


def prompt_lines(path: Path) -> list[tuple[str, str]]:
    """The lines that are not blank, each behind where it stands."""
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        rule = "it has to be a UTF-8 text file"
        raise EvaluationError("--prompts", f"{path}: {error}", rule, "Check the path.") from error
    found = [(f"{path}:{n}", line) for n, line in enumerate(lines, start=1) if line.strip()]
    if not found:
        rule = "it holds no prompt"
        raise EvaluationError("--prompts", str(path), rule, "Add at least one line.")
    return found


def _parsed(where: str, line: str) -> Any:
    try:
        return json.loads(line)
    except ValueError as error:
        raise EvaluationError(
            where,
            f"{error}; the line starts with {line[:60]!r}",
            "each line of a .jsonl file is one JSON object",
            "Repair or delete the line; nothing was sent.",
        ) from error


def _ids(where: str, entry: Any, tokenizer: Any | None) -> list[int]:
    if isinstance(entry, dict):
        ids = entry.get("input_ids")
        if isinstance(ids, list) and ids and all(type(i) is int and i >= 0 for i in ids):
            return ids
        entry = entry.get("prompt")
    if not isinstance(entry, str):
        raise EvaluationError(
            where,
            f"{entry!r}",
            "a prompt is a text, or a JSON object with `prompt` (text) or `input_ids` (integers)",
            "Repair or delete the line; nothing was sent.",
        )
    if tokenizer is None:
        raise EvaluationError(
            where,
            "a text",
            "there is no tokenizer beside the model to encode it",
            "Give `input_ids` in a .jsonl file, or leave --prompts out for random tokens.",
        )
    ids = list(tokenizer(entry)["input_ids"])
    if not ids:
        rule = "a prompt has at least one token"
        raise EvaluationError(where, repr(entry), rule, "Delete the line.")
    return ids
