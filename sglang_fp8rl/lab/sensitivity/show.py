"""The finding as tables on a terminal."""

from __future__ import annotations

from statistics import fmean
from typing import TYPE_CHECKING

from .finding import Check, Finding, ModuleFinding
from .prompt_groups import Measured

if TYPE_CHECKING:
    from rich.console import Console

_LARGEST = 12


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
    console.print(
        f"{len(choice.modules)} modules in BF16 take {choice.extra_bytes / 1e6:.2f} MB more: "
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
        f"KL {_text(check.everything)} with everything quantized, {_text(check.chosen)} with the "
        f"choice left out: {check.share.value:.1%} ± {check.share.error:.1%} is left, predicted "
        f"{check.predicted_share:.1%}. Effects alone sum to {_text(check.sum_of_effects)}; "
        f"everything at once is {check.additivity:.2f} × that."
    )


def _text(measured: Measured) -> str:
    return f"{measured.value:.2e} ± {measured.error:.0e}"


def _per_byte(one: ModuleFinding) -> float:
    return one.kl.value / one.module.extra_bytes
