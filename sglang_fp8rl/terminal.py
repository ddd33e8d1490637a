"""What the commands share: exit statuses, consoles, errors on stderr, options, and a plan as a table."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from .errors import ConfigError, Fp8RlError

# FOUND_WRONG: it ran, and an output differs, a host is unsupported, a model is worse, …
# BAD_INPUT: the input is bad, or a server failed. INTERRUPTED: Ctrl-C, as shells count it.
FINE, FOUND_WRONG, BAD_INPUT, INTERRUPTED = 0, 1, 2, 130
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")
_STYLES = {"blockwise": "green", "per_channel": "yellow"}

JsonFlag = Annotated[bool, typer.Option("--json", help="The result as JSON on stdout.")]
OptionsText = Annotated[
    str, typer.Option(help='As in quantization_config, e.g. \'{"misaligned": "bf16"}\'.')
]


def console(*, stderr: bool = False, width: int = 120) -> Console:
    """A console on stdout, or on stderr; one that is no terminal gets `width` columns for tables."""
    made = Console(stderr=stderr)
    return made if made.is_terminal else Console(stderr=stderr, width=width)


@contextmanager
def errors_told(*more_lines: str, interrupted: str | None = None) -> Iterator[None]:
    """What goes wrong within is said on stderr, and the command leaves with the status for it.

    Args:
        more_lines: said behind an error: what helps to look into it.
        interrupted: said after Ctrl-C: what is kept, and how to go on.

    Raises:
        typer.Exit: with BAD_INPUT after a `Fp8RlError`, with INTERRUPTED after Ctrl-C.
    """
    try:
        yield
    except Fp8RlError as error:
        told = console(stderr=True)
        told.out(f"error: {error}", style="red", highlight=False)
        for line in more_lines:
            told.out(line, highlight=False)
        raise typer.Exit(BAD_INPUT) from error
    except KeyboardInterrupt as error:
        if interrupted is not None:
            console(stderr=True).out(interrupted, highlight=False)
        raise typer.Exit(INTERRUPTED) from error


def parsed_options(text: str) -> dict[str, Any]:
    """The value of `--options`. Raises `ConfigError` if it is no JSON object."""
    try:
        parsed = json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigError("--options", repr(text), f"it is JSON: {error}", "Correct it.") from error
    if not isinstance(parsed, dict):
        raise ConfigError("--options", repr(text), "it is a JSON object", 'Write {"key": value}.')
    return parsed


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
