"""Which files of a distribution go in: a pure function of their paths and the recipe's rules."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from .errors import BundleError


@dataclass(frozen=True)
class Drop:
    """Files that stay out. `*` in `pattern` crosses folders; `why` is for the report.

    `distribution` is a canonical name, or `*` for all of them. A rule for one distribution must
    match something: one that does not was written for another version.
    """

    distribution: str
    pattern: str
    why: str


@dataclass
class Selection:
    """`kept` and `dropped` (path → the rule) together are all files, each in one of them."""

    kept: list[str] = field(default_factory=list)
    dropped: dict[str, Drop] = field(default_factory=dict)


def select(
    distribution: str, paths: Iterable[str], drops: Sequence[Drop], keep: Iterable[str] = ()
) -> Selection:
    """Decide each of `paths` (posix, relative to site-packages) by the first rule that matches.

    Args:
        distribution: canonical name.
        keep: patterns that no rule may drop: what would break an import is named there.

    Raises:
        BundleError: a rule for this distribution, or a `keep` pattern, matches none of its files.
    """
    rules = [rule for rule in drops if rule.distribution in ("*", distribution)]
    keep = tuple(keep)
    chosen, used, held = Selection(), set(), set()
    for path in sorted(paths):
        holders = [pattern for pattern in keep if fnmatchcase(path, pattern)]
        held.update(holders)
        matches = [rule for rule in rules if fnmatchcase(path, rule.pattern)]
        used.update(matches)
        if holders or not matches:
            chosen.kept.append(path)
        else:
            chosen.dropped[path] = matches[0]
    stale = [rule.pattern for rule in rules if rule.distribution != "*" and rule not in used]
    stale += [pattern for pattern in keep if pattern not in held]
    if stale:
        raise BundleError(
            distribution, stale, "a rule that matches no file of it", "Adapt the recipe."
        )
    return chosen


def undecided(
    pins: Mapping[str, str], taken: Iterable[str], left_out: Mapping[str, str]
) -> list[str]:
    """Pinned distributions that the recipe neither takes nor leaves out, and those it does twice."""
    taken = set(taken)
    return sorted(
        [f"{name}: undecided" for name in pins if name not in taken and name not in left_out]
        + [f"{name}: taken and left out" for name in taken if name in left_out]
        + [f"{name}: not pinned" for name in (taken | set(left_out)) if name not in pins]
    )
