"""The lab's commands; those of `eval` stand beside what they run. They import what they need when they run."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections import Counter
from pathlib import Path
from typing import Annotated, Any

import typer

from .. import __version__
from ..errors import ConfigError
from .eval.aime import eval_aime
from .eval.mismatch import check_plot_path, mismatch
from .terminal import FOUND_WRONG, INTERRUPTED, JsonFlag, console, errors_told, print_json

OptionsText = Annotated[
    str, typer.Option(help='As in quantization_config, e.g. \'{"misaligned": "bf16"}\'.')
]


def add_commands(app: typer.Typer) -> None:
    app.command()(plan)
    app.command()(doctor)
    app.command()(demo)
    app.command()(export)
    app.command("eval-aime")(eval_aime)
    app.command("mismatch")(mismatch)
    app.command("sensitivity")(sensitivity)


def plan(
    model: Annotated[str, typer.Argument(help="Directory with config.json, or a model's name.")],
    tp: Annotated[int, typer.Option(min=1, help="Tensor-parallel size.")] = 1,
    ep: Annotated[int, typer.Option(min=1, help="Expert-parallel size.")] = 1,
    dtype: Annotated[str, typer.Option(help="The server's; auto serves FP32 in FP16.")] = "auto",
    options: OptionsText = "{}",
    trust_remote_code: Annotated[bool, typer.Option("--trust-remote-code")] = False,
    as_json: JsonFlag = False,
) -> None:
    """Which module is served how, and why. Loads no weights and needs no GPU.

    Exit status: 0; 2 if the model can't be served, with the reason.
    """
    from .plan_offline import make_plan
    from .plan_table import plan_table

    with errors_told(), console(stderr=True).status("SGLang builds the model without memory"):
        made = make_plan(
            model,
            tp_size=tp,
            ep_size=ep,
            dtype=dtype,
            options=parsed_options(options),
            trust_remote_code=trust_remote_code,
        )
    if as_json:
        print_json(made.document)
        return
    console().print(plan_table(made.document["modules"], f"{model}, tensor parallel {tp}"))
    schemes = Counter(module.scheme for module in made.modules.values())
    counts = ", ".join(f"{count} {scheme}" for scheme, count in schemes.items())
    megabytes = made.document["fp8_bytes"] / 1e6
    typer.echo(f"{counts}; {megabytes:.1f} MB of FP8 weights on each rank")
    kv = made.document.get("kv_scales")
    if kv is not None:
        scaled = kv["refused"] or f"{kv['mode']}, {kv['layers']} layers scaled"
        typer.echo(f"with --kv-cache-dtype fp8_e4m3: {scaled}")


def doctor(as_json: JsonFlag = False) -> None:
    """Can this machine serve? Versions, host symbols, plugin, device, casts, tensor sharing, trainer.

    The last line is the verdict: whether this machine, this SGLang and this trainer fit.

    Exit status: 0 if nothing stands in the way; 1 if something does.
    """
    from rich.markup import escape
    from rich.table import Table

    from .doctor import PROBLEM, examine, verdict

    with errors_told(), console(stderr=True).status("looking") as status:
        findings = examine(lambda name: status.update(f"looking at: {name}"))
    is_ok = all(finding.state != PROBLEM for finding in findings)
    if as_json:
        rows = [finding._asdict() for finding in findings]
        said = {"version": __version__, "ok": is_ok, "verdict": verdict(findings)}
        print_json(said | {"findings": rows})
    else:
        table = Table("", "check", "finding")
        styles = {"ok": "green", "note": "yellow", "problem": "red"}
        for check, state, detail in findings:
            table.add_row(f"[{styles[state]}]{state}[/]", check, escape(detail))
        console().print(table)
        typer.echo(verdict(findings))
    if not is_ok:
        raise typer.Exit(FOUND_WRONG)


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
    from .testing.weight_sets import Checkpoint

    shown = console(stderr=as_json)
    if model is not None:
        with errors_told():  # before there is a directory
            Checkpoint(model).check()
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
        print_json(report.as_dict())
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

    left = f"Interrupted. What this wrote to {out} is no checkpoint; the next try needs an empty folder."
    with errors_told(interrupted=left):
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
                on_bytes=lambda nbytes: progress.advance(task, nbytes),
            )
    if as_json:
        print_json(asdict(report))
        return
    shown = console()
    for name, reason in report.misaligned.items():
        shown.print(f"stays in BF16: {name}: {reason}", markup=False)
    short = f" ({report.short} with short last blocks, which transformers refuses or misreads)"
    shown.print(
        f"{report.quantized} weights in FP8{short if report.short else ''}, {report.kept} tensors as they are; "
        f"{report.nbytes_before / 1e6:.1f} MB to {report.nbytes / 1e6:.1f} MB in {out}",
        markup=False,
    )


def sensitivity(
    model: Annotated[str, typer.Argument(help="Directory of a BF16 or FP32 checkpoint.")],
    budget: Annotated[
        str, typer.Option(help="Memory to give back: 10% of what FP8 saves, or 12MB.")
    ] = "10%",
    prompts: Annotated[
        Path | None, typer.Option(help="A prompt per line, or .jsonl with prompt or input_ids.")
    ] = None,
    new_tokens: Annotated[
        int, typer.Option(min=0, help="Of the model's own answer to a prompt; 0: prompts only.")
    ] = 64,
    samples: Annotated[int, typer.Option(min=1, help="Answers to each prompt.")] = 1,
    tp_size: Annotated[
        int, typer.Option("--tp", min=1, help="Tensor-parallel size of the server.")
    ] = 1,
    ep_size: Annotated[
        int, typer.Option("--ep", min=1, help="Expert-parallel size of the server.")
    ] = 1,
    options: OptionsText = "{}",
    results: Annotated[
        Path, typer.Option(help="Measurements, written as they come; a run goes on from them.")
    ] = Path("sensitivity.jsonl"),
    by_operand: Annotated[
        bool, typer.Option("--by-operand", help="Also weights and inputs alone; thrice the time.")
    ] = False,
    dtype: Annotated[str, typer.Option(help="Of the computation: float32, bfloat16.")] = "float32",
    device: Annotated[str, typer.Option(help="cpu, or cuda.")] = "cpu",
    tokens_at_once: Annotated[
        int, typer.Option("--batch-tokens", min=1, help="Tokens of a forward pass.")
    ] = 2048,
    plot: Annotated[Path | None, typer.Option(help="Also draw it: .png, .pdf, .svg.")] = None,
    as_json: JsonFlag = False,
) -> None:
    """Measure what each module's quantization costs, and choose what to leave in BF16.

    Exit status: 0; 1 if the choice does not bring half of what was predicted; 2 for bad input; 130 if
    interrupted: the same command goes on from what was measured.
    """
    given = dict(locals())  # the parameters are called as the settings of a run are
    from rich.progress import Progress

    from .sensitivity.measure import Settings
    from .sensitivity.run import run_sensitivity
    from .sensitivity.show import plot_finding, print_finding

    for name in ("model", "plot", "as_json"):
        del given[name]
    with errors_told(interrupted=f"Interrupted. The same command goes on from {results}."):
        if plot is not None:
            check_plot_path(plot)
        settings = Settings(**given | {"options": parsed_options(options)})
        with Progress(console=console(stderr=True)) as progress:
            task = progress.add_task("plan", total=None)
            finding = run_sensitivity(
                model,
                settings,
                on_total=lambda name, total: progress.reset(task, description=name, total=total),
                on_step=lambda name: progress.advance(task),
            )
        if plot is not None:
            plot_finding(finding, plot)
    if as_json:
        print_json(finding.as_dict())
    else:
        print_finding(finding, console())
    if not finding.holds:
        raise typer.Exit(FOUND_WRONG)


def parsed_options(text: str) -> dict[str, Any]:
    """The value of `--options`. Raises `ConfigError` if it is no JSON object."""
    try:
        parsed = json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigError(
            "--options", repr(text), f"it has to be JSON: {error}", "Correct it."
        ) from error
    if not isinstance(parsed, dict):
        raise ConfigError(
            "--options", repr(text), "it has to be a JSON object", 'Write {"key": value}.'
        )
    return parsed
