"""`python -m tools.offline_bundle`: build the archive for a GPU host without network.

Exit status: 0 built; 2 it could not be; 130 interrupted.
"""

from __future__ import annotations

import json
import signal
import sys
import tempfile
from pathlib import Path
from types import FrameType
from typing import Annotated, NoReturn

import typer
from rich.console import Console

from sglang_fp8rl.lab.demo.show import Screen

from .build import REPOSITORY, BuildOptions, build
from .errors import BundleError
from .report import as_dict, print_report

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def main(
    output: Annotated[Path, typer.Option(help="Folder for the archive.")] = REPOSITORY / "dist",
    uv: Annotated[
        Path, typer.Option(exists=True, dir_okay=False, help="The uv to download with.")
    ] = REPOSITORY / ".uv/bin/uv",
    max_mib: Annotated[float, typer.Option(help="The largest archive that passes.")] = 60,
    level: Annotated[int, typer.Option(min=0, max=9, help="Of xz; less is faster.")] = 6,
    check: Annotated[
        bool, typer.Option(help="Install it beside torch, SciPy and the like, and import it.")
    ] = True,
    as_json: Annotated[bool, typer.Option("--json", help="The result as JSON on stdout.")] = False,
) -> None:
    """Build one archive with SGLang 0.5.16 and this plugin for a host without network."""
    console = Console(stderr=as_json)
    signal.signal(signal.SIGTERM, _terminate)  # so that the scratch folder goes
    try:
        with tempfile.TemporaryDirectory(prefix="sglang-offline-") as scratch:
            programs = uv, Path(sys.executable)
            options = BuildOptions(*programs, Path(scratch), output, max_mib, level, check)
            built = build(options, Screen(console))
    except BundleError as error:
        console.print(f"error: {error}", markup=False, highlight=False)
        raise typer.Exit(2) from None
    if as_json:
        print(json.dumps(as_dict(built), indent=1))
    else:
        print_report(built, console)


def _terminate(signum: int, frame: FrameType | None) -> NoReturn:
    raise SystemExit(128 + signum)


app()
