"""What an AIME run depends on, and checks of values that options were given."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf
from pathlib import Path

from ...errors import ConfigError
from ..terminal import in_the_way_of
from .server import normalize_url

PROMPT_TEMPLATE = (
    "{problem}\n\nPlease reason step by step, and put your final answer within \\boxed{{}}."
)
_GREEDY = "1 at --temperature 0, where more samples are the same answer again"
_TEMPLATE_RULE = "a text with {problem} in it, and every other brace twice"


@dataclass(frozen=True)
class EvalOptions:
    """Everything that a run depends on: what the options of `eval_aime` say of themselves.

    Attributes:
        retries: attempts of a request that fails for a passing reason.
        alpha: level of the test; intervals have confidence 1 - alpha.
    """

    url: str
    problems: str
    out: Path
    baseline_url: str | None = None
    split: str = "train"
    samples: int = 16
    temperature: float = 1.0
    top_p: float = 0.7
    max_tokens: int = 20480
    concurrency: int = 64
    timeout: float = 3600.0
    retries: int = 3
    template: str = PROMPT_TEMPLATE
    alpha: float = 0.05
    api_key: str | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        urls = self.endpoints
        check_values(
            ("--n", self.samples, self.samples >= 1, "at least 1"),
            ("--temperature", self.temperature, 0 <= self.temperature < inf, "finite, at least 0"),
            ("--n", self.samples, self.samples == 1 or self.temperature > 0, _GREEDY),
            ("--top-p", self.top_p, 0 < self.top_p <= 1, "above 0 and at most 1"),
            ("--max-tokens", self.max_tokens, self.max_tokens >= 1, "at least 1"),
            ("--concurrency", self.concurrency, self.concurrency >= 1, "at least 1"),
            ("--timeout", self.timeout, 1 <= self.timeout < inf, "finite, at least 1 second"),
            ("--alpha", self.alpha, 0 < self.alpha < 1, "between 0 and 1"),
            ("--out", self.out, in_the_way_of(self.out) is None, "a folder that can be written"),
            ("--url-baseline", urls[-1], len(set(urls)) == len(urls), "another URL than --url"),
            ("--template", repr(self.template), _has_a_place(self.template), _TEMPLATE_RULE),
        )

    @property
    def endpoints(self) -> list[str]:
        urls = [self.url] if self.baseline_url is None else [self.url, self.baseline_url]
        return [normalize_url(url) for url in urls]


def check_values(*checks: tuple[str, object, bool, str]) -> None:
    """Raise `ConfigError` for the first that is not good of (option, value, is good, what is good)."""
    for option, value, is_good, good in checks:
        if not is_good:
            raise ConfigError(option, str(value), f"it has to be {good}", "Choose another value.")


def _has_a_place(template: str) -> bool:
    try:
        return "\0" in template.format(problem="\0")
    except (KeyError, IndexError, ValueError):
        return False
