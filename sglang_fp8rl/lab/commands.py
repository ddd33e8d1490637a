"""The lab's commands: demo, export, and the evaluations. They import what they need when they run."""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path
from typing import Annotated

import typer

from ..terminal import (
    FOUND_WRONG,
    INTERRUPTED,
    JsonFlag,
    OptionsText,
    console,
    errors_told,
    parsed_options,
)
from .eval.aime import eval_aime
from .eval.mismatch import mismatch
from .sensitivity.command import sensitivity


def add_commands(app: typer.Typer) -> None:
    """Add them to the command line."""
    app.command()(demo)
    app.command()(export)
    app.command("eval-aime")(eval_aime)
    app.command("mismatch")(mismatch)
    app.command("sensitivity")(sensitivity)


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
    from .demo.run import run_demo
    from .demo.show import Screen, print_report

    shown = console(stderr=as_json)
    directory = Path(tempfile.mkdtemp(prefix="sglang-fp8rl-demo-"))
    delete = not keep
    try:
        with errors_told(f"Files of this run: {directory}"):
            report = run_demo(model, directory, Screen(shown))
            print_report(report, shown)
        delete = delete and report.ok
    except typer.Exit as left:
        delete = delete and left.exit_code == INTERRUPTED
        raise
    finally:
        if delete:
            shutil.rmtree(directory)
    if keep:
        shown.print(f"Kept: {directory}", markup=False)
    if as_json:
        typer.echo(json.dumps(report.as_dict()))
    if not report.ok:
        raise typer.Exit(FOUND_WRONG)


def export(
    model: Annotated[str, typer.Argument(help="Directory of a BF16 or FP32 checkpoint.")],
    out: Annotated[Path, typer.Argument(help="Where to write; empty or not there.")],
    tp: Annotated[
        int, typer.Option(min=1, help="Tensor-parallel size it will be served with.")
    ] = 1,
    options: OptionsText = "{}",
    trust_remote_code: Annotated[bool, typer.Option("--trust-remote-code")] = False,
    as_json: JsonFlag = False,
) -> None:
    """Write a block-FP8 checkpoint, as DeepSeek and Qwen publish them, with the served bytes.

    What can't be cut into blocks stays in BF16 and is listed in modules_to_not_convert.

    Exit status: 0; 2 if it can't be exported, with the reason.
    """
    from dataclasses import asdict

    from rich.progress import Progress

    from .export import export_checkpoint

    with errors_told():
        wanted = parsed_options(options)
        with Progress(console=console(stderr=True)) as progress:
            task = progress.add_task("SGLang builds the model without memory", total=None)
            report = export_checkpoint(
                model,
                out,
                tp_size=tp,
                options=wanted,
                trust_remote_code=trust_remote_code,
                on_start=lambda total: progress.update(task, description="quantize", total=total),
                on_bytes=lambda done: progress.advance(task, done),
            )
    if as_json:
        typer.echo(json.dumps(asdict(report)))
        return
    shown = console()
    for name, reason in report.misaligned.items():
        shown.print(f"stays in BF16: {name}: {reason}", markup=False)
    shown.print(
        f"{report.quantized} weights in FP8, {report.kept} tensors as they are; "
        f"{report.nbytes_before / 1e6:.1f} MB to {report.nbytes / 1e6:.1f} MB in {out}"
    )
