"""What a server says to a fixed set of prompts, and where two servers differ first."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

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
    outputs = []
    for prompt in prompts:
        meta = client.generate(prompt, NEW_TOKENS)["meta_info"]
        new = meta["output_token_logprobs"]
        every = [*meta["input_token_logprobs"], *new]
        tokens = tuple(token for _, token, *_ in new)
        outputs.append(Output(tokens, tuple(logprob for logprob, *_ in every)))
    return outputs


def differences(found: Sequence[Output], expected: Sequence[Output]) -> list[str]:
    """One line for each prompt whose tokens or log-probabilities are not bitwise equal."""
    lines = []
    for number, (one, other) in enumerate(zip(found, expected, strict=True), start=1):
        kinds = {
            "token": (one.tokens, other.tokens),
            "log-probability": (one.logprobs, other.logprobs),
        }
        for kind, sides in kinds.items():
            pairs = enumerate(zip(*sides, strict=True))
            first = next(((at, a, b) for at, (a, b) in pairs if a != b), None)
            if first is not None:
                at, ours, theirs = first
                lines.append(f"prompt {number}: {kind} {at} is {ours}, expected {theirs}")
                break
    return lines
