"""What a server says to a fixed set of prompts, and where two servers differ first."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ...client import RefitClient

PROMPT_LENGTHS = (3, 17, 64, 131)  # below, at and above one block of 128 rows
NEW_TOKENS = 8


@dataclass(frozen=True)
class Output:
    """One answer: the generated tokens, and the log-probability of every token, prompt included."""

    tokens: tuple[int, ...]
    logprobs: tuple[float | None, ...]


def make_prompts(vocab_size: int) -> list[list[int]]:
    """Seeded token ids: no tokenizer is needed, so any checkpoint can be asked."""
    draw = random.Random(0)
    return [[draw.randrange(vocab_size) for _ in range(length)] for length in PROMPT_LENGTHS]


def ask(client: RefitClient, prompts: Sequence[Sequence[int]]) -> list[Output]:
    """Greedy answers, one prompt at a time, so that the batch is the same on every server."""
    return [_output(client.generate(prompt, NEW_TOKENS)) for prompt in prompts]


def _output(answer: dict[str, Any]) -> Output:
    meta = answer["meta_info"]
    pairs = [*meta["input_token_logprobs"], *meta["output_token_logprobs"]]
    return Output(
        tokens=tuple(token for _, token, *_ in meta["output_token_logprobs"]),
        logprobs=tuple(logprob for logprob, *_ in pairs),
    )


def differences(found: Sequence[Output], expected: Sequence[Output]) -> list[str]:
    """One line for each prompt whose tokens or log-probabilities are not bitwise equal."""
    lines = []
    for number, (one, other) in enumerate(zip(found, expected, strict=True), start=1):
        if one.tokens != other.tokens:
            at = _first(one.tokens, other.tokens)
            lines.append(
                f"prompt {number}: token {at} is {one.tokens[at]}, expected {other.tokens[at]}"
            )
        elif one.logprobs != other.logprobs:
            at = _first(one.logprobs, other.logprobs)
            lines.append(
                f"prompt {number}: log-probability {at} is {one.logprobs[at]}, "
                f"expected {other.logprobs[at]}"
            )
    return lines


def _first(one: Sequence[Any], other: Sequence[Any]) -> int:
    return next(at for at, (a, b) in enumerate(zip(one, other, strict=True)) if a != b)
