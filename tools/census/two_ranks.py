"""The census at two ranks in `docs/models.md`: what became of classes otherwise than at one rank."""

from __future__ import annotations

from .layout import TWO_RANKS, Layout
from .outcome import Row, summary
from .page import escaped, names_of, shortened
from .results import described, newest


def section() -> str:
    """Of the newest host."""
    return "\n".join(_of_layout(layout) for layout in TWO_RANKS)


def _of_layout(layout: Layout) -> str:
    provenance, rows = newest(layout)
    if not rows:
        return f"### {layout.title}: not tried\n"
    judged = [row for row in rows.values() if not row.is_left_out]
    lines = [f"### {layout.title}: {summary(judged)}", "", described(provenance), ""]
    lines += [_blocks(judged), ""]
    other = _otherwise(newest()[1], judged)
    if other:
        lines += ["| at one rank | here | why | classes |", "|---|---|---|---|"]
        lines += [f"| {' | '.join(one)} | {names_of(those)} |" for one, those in other.items()]
    else:
        lines.append("Each is what it is at one rank.")
    return "\n".join([*lines, ""])


def _blocks(rows: list[Row]) -> str:
    """How many were cut within blocks, and how many between them."""
    whole, broken = ({one.architecture for one in rows if kind in one.schemes} for kind in _SCHEMES)
    return (
        f"FP8 modules whose part on a rank is made of whole blocks: in {len(whole)} classes; where the cut breaks a block: "
        f"in {len(broken)}; both in {len(whole & broken)}."
    )


_SCHEMES = ("blockwise", "per_channel")


def _otherwise(one_rank: dict[str, Row], rows: list[Row]) -> dict[tuple[str, str, str], list[Row]]:
    """Classes by what they are at one rank, here, and why."""
    found: dict[tuple[str, str, str], list[Row]] = {}
    for row in rows:
        before = one_rank.get(row.architecture)
        was, now = _told(before) if before else "not tried", _told(row)
        if was != now:
            found.setdefault((was, now, _why(row)), []).append(row)
    return dict(sorted(found.items()))


def _told(row: Row) -> str:
    if row.silent:
        return "silent"
    return f"{row.kind}, {'token' if row.is_proven else 'bytes'}" if row.is_judged else row.kind


def _why(row: Row) -> str:
    said = row.silent or [*row.reasons, *filter(None, [row.not_run])]
    return escaped(shortened("; ".join(said)))
