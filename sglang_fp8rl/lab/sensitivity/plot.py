"""The finding as a figure: effects and SQNR over depth, and what memory buys."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from .budget import choose
from .finding import Finding

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_COLOURS = ("#3b6fb6", "#c8553d", "#4f9d69", "#8e6bb0", "#b08a2e", "#4a4a4a")
_RING: dict[str, Any] = {"s": 70, "facecolors": "none", "edgecolors": "black", "linewidths": 0.9}


def plot_finding(finding: Finding, path: Path) -> None:
    """Draw a finding into `path`.

    Side Effects:
        Writes the file. No global matplotlib state is touched.
    """
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
