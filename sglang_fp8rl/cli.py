"""`sglang-fp8rl`: demo, doctor, plan, and the evaluations. Imports torch and SGLang when needed.

Exit status of every command: 0 as it should be; 1 it ran and found something wrong (an output that
differs, an unsupported host); 2 bad input, or a server that failed; 130 interrupted.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Annotated

import typer

from . import __version__
from .errors import Fp8RlError

if TYPE_CHECKING:
    from rich.console import Console

FOUND_WRONG, BAD_INPUT, INTERRUPTED = 1, 2, 130

app = typer.Typer(
    help="FP8 rollout for RL on SGLang: every weight update is re-quantized in place, exactly.",
    epilog="Exit status: 0 fine; 1 something is wrong; 2 bad input or a server failed; "
    "130 interrupted.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

JsonFlag = Annotated[bool, typer.Option("--json", help="The result as JSON on stdout.")]


def _print_version(value: bool) -> None:
    if value:
        typer.echo(__version__)
        raise typer.Exit()


@app.callback()
def main(
    version: Annotated[
        bool,
        typer.Option(
            "--version", help="Print it and leave.", callback=_print_version, is_eager=True
        ),
    ] = False,
) -> None:
    """FP8 rollout for RL on SGLang."""


@app.command()
def demo(
    model: Annotated[
        Path | None, typer.Option(help="Your checkpoint's directory; default: a small Qwen3.")
    ] = None,
    as_json: JsonFlag = False,
    keep: Annotated[bool, typer.Option(help="Keep the checkpoints and server logs.")] = False,
) -> None:
    """Serve, refit over HTTP, refit back; check every output against servers started fresh.

    Exit status: 0 if every output is bitwise equal; 1 if one differs; 2 if it could not be run.
    """
    from .demo.report import print_report
    from .demo.run import DemoOptions, run_demo
    from .demo.screen import Screen

    console = _console(stderr=as_json)
    directory = Path(tempfile.mkdtemp(prefix="sglang-fp8rl-demo-"))
    delete = not keep
    try:
        report = run_demo(DemoOptions(model, directory), Screen(console))
        delete = delete and report.ok
        print_report(report, console)
    except Fp8RlError as error:
        delete = False
        _fail(error, f"Files of this run: {directory}")
    except KeyboardInterrupt as error:
        raise typer.Exit(INTERRUPTED) from error
    finally:
        if delete:
            shutil.rmtree(directory)
    if keep:
        console.print(f"Kept: {directory}", markup=False)
    if as_json:
        typer.echo(json.dumps(report.as_dict()))
    if not report.ok:
        raise typer.Exit(FOUND_WRONG)


def _console(*, stderr: bool = False) -> Console:
    """A console; one that is no terminal gets room for tables."""
    from rich.console import Console

    console = Console(stderr=stderr)
    return console if console.is_terminal else Console(stderr=stderr, width=120)


def _fail(error: Exception, *more: str) -> NoReturn:
    """Say what is wrong and leave with BAD_INPUT."""
    for line in (f"error: {error}", *more):
        print(line, file=sys.stderr)
    raise typer.Exit(BAD_INPUT) from error
