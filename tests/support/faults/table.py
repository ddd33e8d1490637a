"""All rows, and the page that shows them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from . import announced, disk, layouts, names, pairs, payloads, requests_, routes, sessions, values
from .fault import Fault, Group

DOCUMENT = Path(__file__).parents[3] / "docs" / "faults.md"
BEGIN, END = "<!-- faults -->", "<!-- /faults -->"
GROUPS: tuple[Group, ...] = tuple(
    module.GROUP
    for module in (
        requests_, payloads, layouts, names, values, pairs, sessions, announced, disk, routes
    )
)  # fmt: skip
FAULTS: tuple[Fault, ...] = tuple(fault for group in GROUPS for fault in group.faults)


def document() -> str:
    """`docs/faults.md` as it has to be."""
    before, _, rest = DOCUMENT.read_text().partition(BEGIN)
    after = rest.partition(END)[2]
    lines = [f"{len(FAULTS)} faults in {len(GROUPS)} groups.", ""]
    for group in GROUPS:
        lines += [f"## {group.title}", ""]
        for outcome, faults in _together(group.faults, _outcome):
            lines += [f"**{outcome}**", ""]
            lines += [_line(words, alike) for words, alike in _together(faults, _words)]
            lines += [""]
    return f"{before}{BEGIN}\n" + "\n".join(lines).rstrip() + f"\n{END}{after}"


def _together(
    faults: Iterable[Fault], key: Callable[[Fault], str]
) -> Iterator[tuple[str, list[Fault]]]:
    """Faults of one key side by side; keys in the order of their first fault."""
    found: dict[str, list[Fault]] = {}
    for fault in faults:
        found.setdefault(key(fault), []).append(fault)
    yield from found.items()


def _outcome(fault: Fault) -> str:
    """The answer, the state in the status, and what is served."""
    answer = str(fault.code) if fault.code else "exception" if fault.told else "no answer"
    named = ", tensor named" if fault.about else ""
    return f"{answer}{named} · {fault.then.value} · {_served(fault)}"


def _words(fault: Fault) -> str:
    return ", ".join(f"*{word}*" for word in fault.told)


def _line(words: str, alike: list[Fault]) -> str:
    names = "; ".join(fault.name for fault in alike)
    return f"- {names}: {words}" if words else f"- {names}"


def _served(fault: Fault) -> str:
    if fault.serves is None:
        return "what arrived"
    return f"{len(fault.serves)} new" if fault.serves else "old"
