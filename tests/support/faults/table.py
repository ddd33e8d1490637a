"""All rows, and the page that shows them."""

from __future__ import annotations

from collections.abc import Iterable
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
        lines += [
            f"## {group.title}",
            "",
            "| what happens | the client is told | the status says | served |",
        ]
        lines += ["|---|---|---|---|", *map(_line, group.faults), ""]
    return f"{before}{BEGIN}\n" + "\n".join(lines).rstrip() + f"\n{END}{after}"


def _line(fault: Fault) -> str:
    cells = [fault.name, _told(fault), fault.then.value, _served(fault)]
    return "| " + " | ".join(cells) + " |"


def _told(fault: Fault) -> str:
    words = ", ".join(f"*{word}*" for word in fault.told)
    if fault.about:
        words = f"the tensor, {words}" if words else "the tensor"
    code = str(fault.code) if fault.code else "an exception" if fault.told else "nothing"
    return f"{code}: {words}" if words else code


def _served(fault: Fault) -> str:
    if fault.serves is None:
        return "what arrived is new"
    return f"{_count(fault.serves)} new" if fault.serves else "old weights"


def _count(names: Iterable[str]) -> str:
    number = len(list(names))
    return f"{number} tensor" + ("s" if number > 1 else "")
