"""A plan as a table: a row for all modules that are alike."""

from __future__ import annotations

import re
from collections.abc import Iterable

from rich.table import Table

_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")
_STYLES = {"blockwise": "green", "per_channel": "yellow"}


def plan_table(plan: Iterable[dict[str, str]], title: str = "plan") -> Table:
    """Columns module, scheme, reason; `layers.{0-27}` stands for modules that are alike."""
    table = Table(title=title, title_justify="left")
    table.add_column("module", overflow="fold")
    table.add_column("scheme", no_wrap=True)
    table.add_column("reason", overflow="fold")
    for module, scheme, reason in grouped(plan):
        style = _STYLES.get(scheme.partition(",")[0], "dim")
        table.add_row(module, scheme, reason or "–", style=style)
    return table


def grouped(plan: Iterable[dict[str, str]]) -> list[tuple[str, str, str]]:
    """(module, scheme, reason), where the module's first number is a set like `{0-3,5}`."""
    groups: dict[tuple[str, str, str], list[int]] = {}
    for row in plan:
        found = _NUMBER.search(row["module"])
        pattern = _NUMBER.sub("{}", row["module"], count=1)
        is_kept = row["scheme"] != "high_precision" and row.get("activations") == "bf16"
        scheme = f"{row['scheme']}, bf16 activations" if is_kept else row["scheme"]
        key = (pattern, scheme, row["reason"])
        groups.setdefault(key, []).extend([int(found.group())] if found else [])
    return [
        (pattern.replace("{}", _ranges(numbers)) if numbers else pattern, scheme, reason)
        for (pattern, scheme, reason), numbers in groups.items()
    ]


def _ranges(numbers: list[int]) -> str:
    """`[0, 1, 2, 5]` → `{0-2,5}`; a single number stands alone."""
    spans: list[list[int]] = []
    for number in sorted(set(numbers)):
        if spans and number == spans[-1][1] + 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    texts = [str(low) if low == high else f"{low}-{high}" for low, high in spans]
    return texts[0] if len(numbers) == 1 else "{" + ",".join(texts) + "}"
