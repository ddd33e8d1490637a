"""`sglang-fp8rl sensitivity`: what each module's quantization costs, and what to leave in BF16."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.progress import Progress

from ...terminal import FOUND_WRONG, JsonFlag, OptionsText, console, errors_told, parsed_options


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
    from ..eval.mismatch import check_plot_path
    from .measure import Settings
    from .run import run_sensitivity  # torch and transformers: not for `--help`
    from .show import plot_finding, print_finding

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
        typer.echo(json.dumps(finding.as_dict()))
    else:
        print_finding(finding, console())
    if not finding.holds:
        raise typer.Exit(FOUND_WRONG)
