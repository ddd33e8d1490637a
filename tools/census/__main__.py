"""`python -m tools.census`: is a replayed refit a fresh load, for every model class that SGLang has?

Exit status: 0 none is silent; 1 one is, or `docs/models.md` is not what was found; 2 `--only` names none; 130
interrupted.
"""

from __future__ import annotations

import json
import sys
from typing import Annotated

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from sglang_fp8rl.lab.terminal import FOUND_WRONG, JsonFlag, console, errors_told

from . import results
from .classes import matching
from .layout import Layout
from .outcome import Row, summary
from .pool import LIMIT_SECONDS, rows_of

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def main(
    only: Annotated[str, typer.Option(help="A regular expression for names of classes.")] = "",
    workers: Annotated[int, typer.Option(min=1, help="Classes at a time.")] = 2,
    limit: Annotated[float, typer.Option(help="Seconds for one class.")] = LIMIT_SECONDS,
    tp: Annotated[int, typer.Option(min=1, help="Ranks of tensor parallelism.")] = 1,
    ep: Annotated[int, typer.Option(min=1, help="Ranks that share the experts, of as many.")] = 1,
    write: Annotated[bool, typer.Option(help="Renew the results and docs/models.md.")] = False,
    as_json: JsonFlag = False,
) -> None:
    """Judge them all; the last line is the sum."""
    layout = Layout(max(tp, ep), ep)
    with errors_told(interrupted="nothing was written"):
        rows = _judged(matching(only), workers, limit, layout)
    if as_json:
        print(json.dumps([row.as_dict() for row in rows], indent=1))
    out = console(stderr=as_json)
    for row in rows:
        if row.silent:
            out.print(
                f"[red]SILENT[/] {row.architecture}: {', '.join(row.silent)}", highlight=False
            )
        elif only:
            why = f": {'; '.join(row.reasons)}" if row.reasons else ""
            out.print(f"{row.architecture}: {row.kind} ({row.names}){why}", markup=False)
    changed = [] if write else results.changed(rows, layout, is_whole=not only)
    for line in changed:
        out.print(f"docs/models.md is not what was found: {line}", markup=False)
    if write and not only:
        out.print(f"written: {results.write(rows, layout)}", markup=False)
        _renew_page()
    out.print(summary(rows), markup=False, highlight=False, soft_wrap=True)
    if changed or any(row.silent for row in rows):
        raise typer.Exit(FOUND_WRONG)


def _judged(wanted: list[str], workers: int, limit: float, layout: Layout) -> list[Row]:
    """Sorted by name; progress goes to stderr."""
    rows = []
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console(stderr=True)) as progress:
        task = progress.add_task("importing SGLang", total=len(wanted))
        for row in rows_of(wanted, workers, limit, layout):
            rows.append(row)
            progress.update(task, advance=1, description=f"{row.kind:9} {row.architecture}"[:60])
    return sorted(rows, key=lambda one: one.architecture)


def _renew_page() -> None:
    sys.path.insert(0, str(results.REPOSITORY / "tests"))
    from support.engine import contract_table

    contract_table.DOCUMENT.write_text(contract_table.document())


app()
