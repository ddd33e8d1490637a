"""What the commands share: exit statuses, consoles and errors on stderr."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from typer.core import TyperGroup

from ..errors import Fp8RlError

# FOUND_WRONG: it ran, and an output differs, a host is unsupported, a model is worse, …
# BAD_INPUT: the input is bad, or a server failed. INTERRUPTED: Ctrl-C, as shells count it.
FINE, FOUND_WRONG, BAD_INPUT, INTERRUPTED = 0, 1, 2, 130

ApiKey = Annotated[
    str | None, typer.Option(envvar="SGLANG_API_KEY", help="Bearer token of the servers.")
]
AdminApiKey = Annotated[
    str | None,
    typer.Option(envvar="SGLANG_ADMIN_API_KEY", help="Of servers that have an admin key."),
]
JsonFlag = Annotated[bool, typer.Option("--json", help="The result as JSON on stdout.")]


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
        typer.Exit: with BAD_INPUT after an error of this package, of the operating system or in a file
            that is read; with INTERRUPTED after Ctrl-C.
    """
    try:
        yield
    except BrokenPipeError:
        raise  # who read stdout is gone: click leaves without a word
    except (Fp8RlError, OSError, json.JSONDecodeError) as error:
        told = console(stderr=True)
        told.out(f"error: {error}", style="red", highlight=False)
        for line in more_lines:
            told.out(line, highlight=False)
        try:
            sys.stdout.flush()
        except OSError:  # of a full disk: Python would try once more at its end, and leave with 120
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise typer.Exit(BAD_INPUT) from error
    except (KeyboardInterrupt, ValueError) as error:
        # Of torch, if Ctrl-C comes as it looks into a file's tensor: it swallows the interrupt.
        if isinstance(error, ValueError) and "UntypedStorage" not in str(error):
            raise
        if interrupted is not None:
            console(stderr=True).out(interrupted, highlight=False)
        raise typer.Exit(INTERRUPTED) from error


def print_json(value: Any) -> None:
    """The result on stdout. JSON has no NaN and no infinity: null stands for them."""
    typer.echo(json.dumps(json.loads(json.dumps(value), parse_constant=lambda _: None)))


def can_be_written(path: Path) -> bool:
    """Whether a file may be written there, in a folder that exists."""
    return os.access(path if path.exists() else path.absolute().parent, os.W_OK)


def in_the_way_of(folder: Path) -> Path | None:
    """What keeps a folder from being made, or files from being written into it; None if nothing does."""
    above = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    return None if above.is_dir() and os.access(above, os.W_OK | os.X_OK) else above


class TellingGroup(TyperGroup):
    """Commands whose errors are told, wherever they come up: printing the result, or the help, included."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        with errors_told():
            return super().parse_args(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        with errors_told():
            return super().invoke(ctx)
