"""`sglang-fp8rl`: demo, doctor, plan, export, verify, and the evaluations. Imports torch and SGLang when needed."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections import Counter
from pathlib import Path
from typing import Annotated

import typer

from . import __version__
from .terminal import (
    FOUND_WRONG,
    INTERRUPTED,
    JsonFlag,
    OptionsText,
    console,
    errors_told,
    parsed_options,
)

app = typer.Typer(
    help="FP8 rollout for RL on SGLang: every weight update is re-quantized in place, exactly.",
    epilog="Exit status: 0 fine; 1 something is wrong; 2 bad input or a server failed; "
    "130 interrupted.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


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
    from .demo.run import DemoOptions, run_demo
    from .demo.show import Screen, print_report

    shown = console(stderr=as_json)
    directory = Path(tempfile.mkdtemp(prefix="sglang-fp8rl-demo-"))
    delete = not keep
    try:
        with errors_told(f"Files of this run: {directory}"):
            report = run_demo(DemoOptions(model, directory), Screen(shown))
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


@app.command()
def doctor(as_json: JsonFlag = False) -> None:
    """Can this machine serve? Versions, host symbols, plugin, device, casts, tensor sharing.

    Exit status: 0 if nothing stands in the way; 1 if something does.
    """
    from rich.table import Table

    from .doctor import PROBLEM, as_dict, examine

    with errors_told(), console(stderr=True).status("looking") as status:
        findings = examine(lambda name: status.update(f"looking at: {name}"))
    if as_json:
        typer.echo(json.dumps(as_dict(findings)))
    else:
        table = Table("", "check", "finding")
        styles = {"ok": "green", "note": "yellow", "problem": "red"}
        for finding in findings:
            style = styles[finding.state]
            table.add_row(f"[{style}]{finding.state}[/]", finding.check, finding.detail)
        console().print(table)
    if any(finding.state == PROBLEM for finding in findings):
        raise typer.Exit(FOUND_WRONG)


@app.command()
def plan(
    model: Annotated[str, typer.Argument(help="Directory with config.json, or a model's name.")],
    tp: Annotated[int, typer.Option(min=1, help="Tensor-parallel size.")] = 1,
    ep: Annotated[int, typer.Option(min=1, help="Expert-parallel size.")] = 1,
    options: OptionsText = "{}",
    trust_remote_code: Annotated[bool, typer.Option("--trust-remote-code")] = False,
    as_json: JsonFlag = False,
) -> None:
    """Which module is served how, and why. Loads no weights and needs no GPU.

    Exit status: 0; 2 if the model can't be served, with the reason.
    """
    from .engine.host.plan_offline import make_plan
    from .plan_table import plan_table

    with errors_told(), console(stderr=True).status("SGLang builds the model without memory"):
        made = make_plan(
            model,
            tp_size=tp,
            ep_size=ep,
            options=parsed_options(options),
            trust_remote_code=trust_remote_code,
        )
    if as_json:
        typer.echo(json.dumps(made.document))
        return
    shown = console()
    shown.print(plan_table(made.document["modules"], f"{model}, tensor parallel {tp}"))
    schemes = Counter(module.scheme for module in made.modules.values())
    counts = ", ".join(f"{count} {scheme}" for scheme, count in schemes.items())
    fp8_bytes = made.document["fp8_bytes"]
    shown.print(f"{counts}; {fp8_bytes / 1e6:.1f} MB of FP8 weights on each rank")
    kv = made.document["kv_scales"]
    scaled = kv["refused"] or f"{kv['mode']}, {kv['layers']} layers scaled"
    shown.print(f"with --kv-cache-dtype fp8_e4m3: {scaled}", highlight=False)


@app.command()
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


@app.command()
def verify(
    urls: Annotated[list[str], typer.Argument(help="Servers, e.g. http://127.0.0.1:30000.")],
    checkpoint: Annotated[
        Path | None, typer.Option(help="Directory of the weights that they should serve.")
    ] = None,
    api_key: Annotated[
        str | None, typer.Option(envvar="SGLANG_API_KEY", help="Bearer token of the servers.")
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Prove what servers hold: against themselves, each other, and a checkpoint. Sends no weights.

    Exit status: 0 if no byte differs; 1 with the name of every tensor that does; 2 if a server or the
    checkpoint can't be read.
    """
    from .verify import verify_servers

    with errors_told(), console(stderr=True).status("reading what is served"):
        comparisons = verify_servers(urls, checkpoint, api_key=api_key)
    if as_json:
        typer.echo(json.dumps([one.as_dict() for one in comparisons]))
    else:
        shown = console()
        for one in comparisons:
            found = one.found
            verdict = "the same bytes" if found.ok else "DIFFERENT"
            shown.print(
                f"{one.server} and {one.other}: {verdict} ({found.compared} tensors compared)",
                markup=False,
            )
            for kind, rows in (
                ("differs", found.differing),
                ("missing", found.missing),
                ("not proven", found.unproven),
            ):
                for name, text in rows.items():
                    shown.print(f"  {kind}: {name}: {text}", markup=False)
    if not all(one.found.ok for one in comparisons):
        raise typer.Exit(FOUND_WRONG)


def _register_evaluations() -> None:
    """From the evaluation folder. They import what they need later."""
    from .eval.aime import eval_aime
    from .eval.mismatch import mismatch
    from .eval.sensitivity.command import sensitivity

    app.command("eval-aime")(eval_aime)
    app.command("mismatch")(mismatch)
    app.command("sensitivity")(sensitivity)


_register_evaluations()
