"""`sglang-fp8rl mismatch`: a served model's log-probabilities against a `transformers` model's."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from ...errors import ConfigError
from ..terminal import (
    AdminApiKey,
    ApiKey,
    JsonFlag,
    can_be_written,
    console,
    errors_told,
    print_json,
)
from .options import check_values

if TYPE_CHECKING:
    from rich.console import Console

    from .gap import MismatchReport

_FORMATS = (".png", ".pdf", ".svg")

# What is shown, in this order, with the value of two equal engines.
_ROWS = (
    ("KL(rollout || trainer), k1", "kl_k1", "0"),
    ("KL(rollout || trainer), k3", "kl_k3", "0"),
    ("ratio p(trainer)/p(rollout), mean", "ratio_mean", "1"),
    ("ratio, max", "ratio_max", "1"),
    ("ratio, min", "ratio_min", "1"),
    ("multiplicative probability error", "mult_prob_error", "1"),
    ("|log-probability difference|, mean", "logprob_diff_mean", "0"),
    ("|log-probability difference|, max", "logprob_diff_max", "0"),
    ("|probability difference|, max", "prob_diff_max", "0"),
    ("Pearson correlation of probabilities", "prob_pearson", "1"),
    ("perplexity, rollout", "rollout_ppl", ""),
    ("perplexity, trainer", "trainer_ppl", ""),
    ("log-perplexity gap", "log_ppl_gap", "0"),
)


def mismatch(
    url: Annotated[str, typer.Option(help="SGLang server, e.g. http://127.0.0.1:30000.")],
    model: Annotated[str, typer.Option(help="The same model for transformers, unquantized.")],
    prompts: Annotated[
        Path | None, typer.Option(help="A prompt per line, or .jsonl with prompt or input_ids.")
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(help="Tokens to sample per prompt.")] = 64,
    temperature: Annotated[float, typer.Option(help="Of the sampling, above 0.")] = 1.0,
    dtype: Annotated[str, typer.Option(help="Of the reference: float32, bfloat16.")] = "bfloat16",
    device: Annotated[str, typer.Option(help="Of the reference: cpu, cuda.")] = "cpu",
    as_served: Annotated[
        bool, typer.Option("--as-served", help="The reference computes with the served weights.")
    ] = False,
    api_key: ApiKey = None,
    admin_api_key: AdminApiKey = None,
    plot: Annotated[Path | None, typer.Option(help="Also draw the gap: .png, .pdf, .svg.")] = None,
    as_json: JsonFlag = False,
) -> None:
    """Measure the gap between a served model and its trainer-side twin.

    Exit status: 0; 2 for bad input or a server that fails; 130 if interrupted.
    """
    from .gap import run_mismatch  # torch and transformers: not for `--help`

    with errors_told():
        if plot is not None:
            check_plot_path(plot)
        report = run_mismatch(
            url,
            model,
            prompts=prompts,
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            dtype=dtype,  # type: ignore[arg-type]  # checked by run_mismatch
            device=device,
            as_served=as_served,
            api_key=api_key,
            admin_api_key=admin_api_key,
        )
        if plot is not None:
            plot_mismatch(report, plot)
    if as_json:
        print_json(report.as_dict())
    else:
        print_mismatch(report, console())


def print_mismatch(report: MismatchReport, console: Console) -> None:
    metrics, settings = report.metrics, report.settings
    table = Table(title=f"{metrics.tokens} tokens of {metrics.sequences} completions")
    table.add_column("rollout against trainer")
    table.add_column("value", justify="right")
    table.add_column("no gap", justify="right", style="dim")
    for label, name, ideal in _ROWS:
        table.add_row(label, f"{getattr(metrics, name):.4g}", ideal)
    console.print(table)
    conditions = "Rollout: {url}; trainer: {model} in {dtype}{weights}; temperature {temperature}."
    weights = ", weights as served" if settings["as_served"] else ""
    console.print(conditions.format(**settings, weights=weights), style="dim", markup=False)
    if metrics.clamped_tokens:
        console.print(
            f"{metrics.clamped_tokens} tokens have ratios beyond e^20, counted as e^20.",
            style="yellow",
        )


def check_plot_path(path: Path) -> None:
    """Refuse, before any work is done, what could not be written at its end.

    Raises:
        ConfigError: no matplotlib, a format that isn't drawn, or no folder that can be written.
    """
    is_drawn, is_there = path.suffix.lower() in _FORMATS, path.absolute().parent.is_dir()
    check_values(
        ("--plot", path, is_drawn, f"a name that ends in {', '.join(_FORMATS)}"),
        ("--plot", path, is_there, "in a folder that exists"),
        ("--plot", path, can_be_written(path), "a file that can be written"),
    )
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError(
            "--plot",
            "no module `matplotlib`",
            "plots are drawn with matplotlib",
            'Install "sglang-fp8rl[lab]", or leave --plot out.',
        )


def plot_mismatch(report: MismatchReport, path: Path) -> None:
    """Draw log-ratios, and the two probabilities of every token, into `path`."""
    from matplotlib.figure import Figure

    metrics, rollout, trainer = report.metrics, report.rollout_logprobs, report.trainer_logprobs
    figure = Figure(figsize=(10, 4.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    left.hist((trainer - rollout).double().numpy(), bins=80, color="#3b6fb6")
    left.axvline(0.0, color="black", linewidth=0.8)
    left.set(
        title=f"k3 KL {metrics.kl_k3:.2e}, largest ratio {metrics.ratio_max:.3g}",
        xlabel="log p(trainer) - log p(rollout)",
        ylabel="tokens",
        yscale="log",
    )
    right.plot([0, 1], [0, 1], color="black", linewidth=0.8)
    probabilities = rollout.exp().numpy(), trainer.exp().numpy()
    right.scatter(*probabilities, s=6, alpha=0.35, color="#3b6fb6", edgecolors="none")
    right.set(
        title=f"{metrics.tokens} tokens, Pearson {metrics.prob_pearson:.4f}",
        xlabel="p(rollout)",
        ylabel="p(trainer)",
        aspect="equal",
    )
    figure.savefig(path, dpi=150)
