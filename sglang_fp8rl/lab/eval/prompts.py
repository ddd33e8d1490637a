"""Prompts as token ids: from a file, from built-in texts, or random when nothing can be read."""

from __future__ import annotations

import json
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
_RANDOM_PROMPTS, _RANDOM_LENGTH = 16, 32


def load_prompts(path: Path | None, tokenizer: Any | None, vocabulary: int) -> list[list[int]]:
    """Return prompts as token ids.

    Args:
        path: a text file with a prompt per line, or JSON lines with `prompt` (text) or `input_ids`;
            None for the built-in texts, or seeded random tokens where there is no tokenizer.
        tokenizer: of the served model, if it has one.
        vocabulary: number of token ids.

    Raises:
        EvaluationError: an unreadable file or line, text without a tokenizer, or no prompt at all.
    """
    if path is not None:
        is_json = path.suffix == ".jsonl"
        return [
            _ids(where, _parsed(where, line) if is_json else line, tokenizer)
            for where, line in prompt_lines(path)
        ]
    if tokenizer is not None:
        return [_ids("built-in prompt", text, tokenizer) for text in BUILT_IN]
    generator = torch.Generator().manual_seed(0)
    shape = (_RANDOM_PROMPTS, _RANDOM_LENGTH)
    return torch.randint(vocabulary, shape, generator=generator).tolist()


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
