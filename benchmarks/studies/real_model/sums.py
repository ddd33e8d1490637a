"""A task that the pretrained model half knows: sums of two small numbers, behind two worked ones.

The start is right about one time in five; what is missing is arithmetic, not the format.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

LARGEST = 20
EXAMPLES = "2+3=5\n7+4=11\n"
Encode = Callable[[str], list[int]]


def encoder_of(folder: Path) -> Encode:
    """From text to ids, without special tokens, by a checkpoint's tokenizer."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    return lambda text: list(tokenizer(text, add_special_tokens=False)["input_ids"])


@dataclass(frozen=True)
class Sum:
    """Two numbers to add; an answer is right if it is the sum and the end of the line."""

    one: int
    other: int
    prompt: list[int]
    answer: list[int]

    @property
    def is_held_out(self) -> bool:
        """Whether it belongs to validation; decided by the numbers, so the two never overlap."""
        return (7 * self.one + 3 * self.other) % 5 == 0


def make_sum(one: int, other: int, encode: Encode) -> Sum:
    return Sum(
        one, other, encode(f"{EXAMPLES}{one}+{other}="), [*encode(str(one + other)), *encode("\n")]
    )


def draw_sums(
    draw: random.Random, count: int, encode: Encode, *, held_out: bool = False
) -> list[Sum]:
    """Problems with uniformly drawn numbers, all of validation or all of training."""
    found: list[Sum] = []
    while len(found) < count:
        problem = make_sum(draw.randint(1, LARGEST), draw.randint(1, LARGEST), encode)
        if problem.is_held_out == held_out:
            found.append(problem)
    return found
