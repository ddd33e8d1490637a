"""What the user sees while the demo works: one line a step, and a moving one while it takes long."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from time import monotonic
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
    TransferSpeedColumn,
)

Advance = Callable[[int, int], None]


class Screen:
    """Numbered steps on a console. Where it is no terminal, lines are printed and nothing moves."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self._step = 0
        self._live: dict[str, Any] = {
            "console": console,
            "transient": True,
            "disable": not console.is_terminal,
        }

    @contextlib.contextmanager
    def step(self, text: str) -> Iterator[None]:
        """A step without a measure: a spinner and the time it has taken."""
        self._announce(text)
        began = monotonic()
        columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
        with Progress(*columns, **self._live) as progress:
            progress.add_task("working", total=None)
            yield
        self._done(began)

    @contextlib.contextmanager
    def bytes_step(self, text: str, total: int) -> Iterator[Advance]:
        """A step that moves bytes: a bar. The callback takes (tensors, bytes) so far."""
        self._announce(text)
        began = monotonic()
        columns = (TextColumn("  "), BarColumn(), TransferSpeedColumn(), TimeElapsedColumn())
        with Progress(*columns, **self._live) as progress:
            task = progress.add_task("bytes", total=total)
            yield lambda _, nbytes: progress.update(task, completed=nbytes)
        self._done(began)

    @contextlib.contextmanager
    def count_step(self, text: str) -> Iterator[Advance]:
        """A step of known length: a bar. The callback takes (done, total)."""
        self._announce(text)
        began = monotonic()
        columns = (TextColumn("  "), BarColumn(), TimeElapsedColumn())
        with Progress(*columns, **self._live) as progress:
            task = progress.add_task("items", total=None)
            yield lambda done, total: progress.update(task, completed=done, total=total)
        self._done(began)

    def note(self, text: str) -> None:
        self.console.print(f"   {text}", markup=False, highlight=False)

    def _announce(self, text: str) -> None:
        self._step += 1
        self.console.print(f"[bold]{self._step:>2}[/bold] {text}", highlight=False)

    def _done(self, began: float) -> None:
        self.console.print(f"   done in {monotonic() - began:.1f} s", style="dim", highlight=False)
