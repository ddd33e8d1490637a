"""The task: sort digits. A problem's answer can be checked exactly, and has a length of its own.

A prompt is `BOS d1 … dn SEP`, its answer the digits in ascending order and `EOS`.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

PAD, BOS, EOS, SEP, FIRST_DIGIT = 0, 1, 2, 3, 4
VOCAB_SIZE = 64  # what SGLang pads a vocabulary to; 14 of the ids are used
MIN_DIGITS, MAX_DIGITS = 5, 8
MAX_PROMPT_TOKENS = MAX_DIGITS + 2

# DAPO's soft overlong punishment: a correct answer never reaches the buffer, rambling does.
MAX_RESPONSE_TOKENS = 12
OVERLONG_BUFFER = 3

_HELD_OUT_PERCENT = 10


class Task(Protocol):
    """What is asked, and the one right answer, as token ids."""

    @property
    def prompt(self) -> list[int]: ...

    @property
    def answer(self) -> list[int]: ...


@dataclass(frozen=True)
class Problem:
    """Digits to sort."""

    digits: tuple[int, ...]

    @property
    def prompt(self) -> list[int]:
        return [BOS, *(FIRST_DIGIT + digit for digit in self.digits), SEP]

    @property
    def answer(self) -> list[int]:
        return [*(FIRST_DIGIT + digit for digit in sorted(self.digits)), EOS]

    def demonstration(self, draw: random.Random) -> list[int]:
        """What the supervised start imitates: in half of the cases the digits in falling order.

        So the start knows how to sort, and RL has to teach it which of the two is wanted.
        """
        if draw.random() < 0.5:
            return self.answer
        return [*reversed(self.answer[:-1]), EOS]

    @property
    def is_held_out(self) -> bool:
        """Whether it belongs to validation; decided by its digits, so the two never overlap."""
        return zlib.crc32(bytes(self.digits)) % 100 < _HELD_OUT_PERCENT


def draw_problems(draw: random.Random, count: int, *, held_out: bool = False) -> list[Problem]:
    """Problems of uniformly drawn length, all of validation or all of training."""
    problems: list[Problem] = []
    while len(problems) < count:
        length = draw.randint(MIN_DIGITS, MAX_DIGITS)
        problem = Problem(tuple(draw.randrange(10) for _ in range(length)))
        if problem.is_held_out == held_out:
            problems.append(problem)
    return problems


def is_correct(problem: Task, response: Sequence[int]) -> bool:
    """Whether the response is the answer, its `EOS` included."""
    return list(response) == problem.answer


def overlong_penalty(response_tokens: int) -> float:
    """0 up to the buffer, then linearly down to −1 at the limit (DAPO, equation 13)."""
    excess = response_tokens - (MAX_RESPONSE_TOKENS - OVERLONG_BUFFER)
    return min(0.0, -excess / OVERLONG_BUFFER)


def reward(problem: Task, response: Sequence[int]) -> float:
    """DAPO's rule-based reward: 1 or −1, less the overlong penalty."""
    return (1.0 if is_correct(problem, response) else -1.0) + overlong_penalty(len(response))
