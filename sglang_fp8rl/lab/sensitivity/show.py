"""The finding as tables on a terminal, and as a figure: effects and SQNR over depth, what memory buys."""

from __future__ import annotations

from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from .finding import Check, Finding, ModuleFinding
from .served_modules import choose

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from rich.console import Console

_LARGEST = 12
_COLOURS = ("#3b6fb6", "#c8553d", "#4f9d69", "#8e6bb0", "#b08a2e", "#4a4a4a")
_RING: dict[str, Any] = {"s": 70, "facecolors": "none", "edgecolors": "black", "linewidths": 0.9}


def print_finding(finding: Finding, console: Console) -> None:
    """Effects by kind and the largest ones, the choice, its check, and the option to paste."""
    from rich.table import Table

    kinds = Table("kind", "modules", "KL", "of the sum", "memory", "weight dB", "input dB")
    total = sum(one.kl.value for one in finding.modules)
    for kind, members in finding.by_kind().items():
        effect = sum(one.kl.value for one in members)
        memory = sum(one.module.extra_bytes for one in members) / finding.saved_bytes
        kinds.add_row(
            kind,
            str(len(members)),
            f"{effect:.2e}",
            f"{effect / total:.1%}" if total else "",
            f"{memory:.1%}",
            f"{fmean(one.fit.weight_db for one in members):.1f}",
            f"{fmean(one.fit.activation_db for one in members):.1f}",
        )
    console.print("Each module quantized alone: KL(BF16 || that), nats per token, summed by kind")
    console.print(kinds)
    largest = Table("module", "scheme", "KL", "±", "per MB", "weight dB", "outlier channel", "")
    for one in sorted(finding.modules, key=_per_byte, reverse=True)[:_LARGEST]:
        channel, times = one.fit.outliers[0]
        largest.add_row(
            one.module.name,
            one.module.scheme,
            f"{one.kl.value:.2e}",
            f"{one.kl.error:.0e}",
            f"{_per_byte(one) * 1e6:.1e}",
            f"{one.fit.weight_db:.1f}",
            f"{channel}: {times:.0f} × median",
            "chosen" if one.is_exempt else "",
        )
    console.print(f"Largest effect per byte, {len(largest.rows)} of {len(finding.modules)}")
    console.print(largest)
    _print_choice(finding, console)


def _print_choice(finding: Finding, console: Console) -> None:
    choice = finding.choice
    count = len(choice.modules)
    console.print(
        f"{count} {'module in BF16 takes' if count == 1 else 'modules in BF16 take'} {choice.extra_bytes / 1e6:.2f} MB more: "
        f"{choice.extra_bytes / finding.saved_bytes:.2%} of what FP8 saves, "
        f"{choice.extra_bytes / finding.served_bytes:.2%} of the served model."
    )
    for name, check in finding.checks.items():
        where = "prompts that chose" if name == "chosen_on" else "prompts held out"
        console.print(f"On {check.prompts} {where}, {check.tokens} tokens: {_sentence(check)}")
    verdict = (
        "The prediction holds: at least half of the promised reduction is there."
        if finding.holds
        else "THE PREDICTION DOES NOT HOLD: less than half of the promised reduction is there."
    )
    console.print(verdict, style="green" if finding.holds else "red")
    console.print("Serve with:")
    console.print(finding.server_argument, markup=False, soft_wrap=True, highlight=False)


def _sentence(check: Check) -> str:
    return (
        f"KL {check.everything} with everything quantized, {check.chosen} with the "
        f"choice left out: {check.share.value:.1%} ± {check.share.error:.1%} is left, predicted "
        f"{check.predicted_share:.1%}. Effects alone sum to {check.sum_of_effects}; "
        f"everything at once is {check.additivity:.2f} × that."
    )


def _per_byte(one: ModuleFinding) -> float:
    return one.kl.value / one.module.extra_bytes


def plot_finding(finding: Finding, path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(15, 4.4), layout="constrained")
    effect, noise, memory = figure.subplots(1, 3)
    for number, (kind, members) in enumerate(finding.by_kind().items()):
        colour = _COLOURS[number % len(_COLOURS)]
        style: dict[str, Any] = {"color": colour, "linewidth": 1.2, "markersize": 3}
        layers = [one.module.layer or 0 for one in members]
        effect.plot(layers, [one.kl.value for one in members], "o-", label=kind, **style)
        noise.plot(layers, [one.fit.weight_db for one in members], "o-", label=kind, **style)
        noise.plot(layers, [one.fit.activation_db for one in members], ":", **style)
        ringed = [(one.module.layer or 0, one.kl.value) for one in members if one.is_exempt]
        effect.scatter([at for at, _ in ringed], [kl for _, kl in ringed], zorder=3, **_RING)
    effect.set(
        title="quantized alone; ringed: left in BF16",
        ylabel="KL(BF16 || module in FP8), nats per token",
        yscale="log",
    )
    noise.set(title="SQNR: weights (solid), inputs (dotted)", ylabel="dB")
    _draw_memory(memory, finding)
    for axes in (effect, noise):
        axes.set_xlabel("decoder layer")
    for axes in (effect, noise, memory):
        axes.legend(fontsize=7)
    figure.savefig(path, dpi=130)


def _draw_memory(axes: Axes, finding: Finding) -> None:
    """Predicted share of the divergence over memory, module by module, and what was measured."""
    served = [one.module for one in finding.modules]
    order = choose(served, finding.effects, finding.saved_bytes).modules
    total = sum(finding.effects.values()) or 1.0
    spent, left = [0.0], [1.0]
    for module in order:
        spent.append(spent[-1] + 100 * module.extra_bytes / finding.saved_bytes)
        left.append(left[-1] - finding.effects[module.name] / total)
    axes.plot(spent, left, color=_COLOURS[0], label="predicted by the sum of effects")
    at = 100 * finding.choice.extra_bytes / finding.saved_bytes
    for name, check in finding.checks.items():
        axes.errorbar(
            [at],
            [check.share.value],
            yerr=[0 if check.share.error != check.share.error else check.share.error],
            fmt="o" if name == "held_out" else "s",
            capsize=3,
            label=f"measured, {name.replace('_', ' ')}",
        )
    axes.set(
        title="what memory buys",
        xlabel="memory given back, % of what FP8 saves",
        ylabel="share of the KL that is left",
        ylim=(0, 1.05),
    )
