"""What a results file says: avg@n, pass@k, and the comparison of two endpoints."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from .problems import Problem
from .results import ResultsFile
from .stats import (
    Comparison,
    Estimate,
    compare_paired,
    estimate_mean,
    pass_at_k,
)


@dataclass(frozen=True)
class ArmReport:
    """One endpoint's results.

    Attributes:
        correct: correct responses of each problem, in the order of the data set.
        avg_at_n: share of correct responses, mean over problems.
        pass_at_k: for k = 1, 2, 4, ... and n.
        truncated: share of responses that ran into the token limit.
        no_answer: share without a recognizable final answer.
        grading_timeouts: responses that the verifier gave up on (counted as wrong).
        mean_tokens: per response; None if the server doesn't count them.
    """

    endpoint: str
    served: dict[str, Any]
    correct: dict[str, int]
    avg_at_n: Estimate
    pass_at_k: dict[int, Estimate]
    truncated: float
    no_answer: float
    grading_timeouts: int
    mean_tokens: float | None


@dataclass(frozen=True)
class EvalReport:
    """A whole run; `comparison` is there when a baseline was given."""

    problems: int
    samples: int
    confidence: float
    candidate: ArmReport
    baseline: ArmReport | None
    comparison: Comparison | None
    notes: tuple[str, ...]

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def build_report(
    results: ResultsFile,
    problems: Sequence[Problem],
    samples: int,
    endpoints: Sequence[str],
    alpha: float,
) -> EvalReport:
    """Summarize the first endpoint, and compare it with the second if there is one."""
    arms = [_arm(results, problems, samples, endpoint, 1 - alpha) for endpoint in endpoints]
    comparison = None
    if len(arms) > 1:
        ours, theirs = (list(arm.correct.values()) for arm in arms)
        comparison = compare_paired(ours, theirs, samples, alpha)
    return EvalReport(
        problems=len(problems),
        samples=samples,
        confidence=1 - alpha,
        candidate=arms[0],
        baseline=arms[1] if len(arms) > 1 else None,
        comparison=comparison,
        notes=tuple(results.notes),
    )


def _arm(
    results: ResultsFile,
    problems: Sequence[Problem],
    samples: int,
    endpoint: str,
    confidence: float,
) -> ArmReport:
    records = {
        problem.id: [results.samples[problem.id, i, endpoint] for i in range(samples)]
        for problem in problems
    }
    everything = [record for group in records.values() for record in group]
    correct = {
        name: sum(r["status"] == "correct" for r in group) for name, group in records.items()
    }
    total = len(everything)

    def estimate(values: list[float]) -> Estimate:
        return estimate_mean(values, total, confidence)

    tokens = [r["tokens"] for r in everything if r.get("tokens") is not None]
    return ArmReport(
        endpoint=endpoint,
        served=results.sessions[endpoint]["settings"].get("served", {}),
        correct=correct,
        avg_at_n=estimate([count / samples for count in correct.values()]),
        pass_at_k={
            k: estimate([pass_at_k(count, samples, k) for count in correct.values()])
            for k in _powers_of_two_and(samples)
        },
        truncated=sum(r["finish_reason"] == "length" for r in everything) / total,
        no_answer=sum(r["status"] == "no_answer" for r in everything) / total,
        grading_timeouts=sum(r["status"] == "timeout" for r in everything),
        mean_tokens=sum(tokens) / len(tokens) if len(tokens) == total else None,
    )


def _powers_of_two_and(samples: int) -> list[int]:
    return sorted({2**i for i in range(samples.bit_length()) if 2**i < samples} | {samples})


def print_report(report: EvalReport, console: Console) -> None:
    """Show the report as a table and, for two arms, a verdict with what it rests on."""
    arms = [arm for arm in (report.candidate, report.baseline) if arm is not None]
    table = Table(title=f"{report.problems} problems, {report.samples} samples each")
    table.add_column("")
    for arm, role in zip(arms, ("candidate", "baseline"), strict=False):
        model = arm.served.get("model", "")
        table.add_column(f"{role}\n{arm.endpoint}\n{model}", justify="right")
    table.add_row(f"avg@{report.samples}", *(_interval(arm.avg_at_n) for arm in arms))
    for k in report.candidate.pass_at_k:
        table.add_row(f"pass@{k}", *(_interval(arm.pass_at_k[k]) for arm in arms))
    table.add_row("truncated", *(f"{arm.truncated:.1%}" for arm in arms))
    table.add_row("no answer found", *(f"{arm.no_answer:.1%}" for arm in arms))
    table.add_row("grading timeouts", *(str(arm.grading_timeouts) for arm in arms))
    means = ("unknown" if a.mean_tokens is None else f"{a.mean_tokens:.0f}" for a in arms)
    table.add_row("tokens per response", *means)
    console.print(table)
    console.print(f"Intervals: {report.confidence:.0%}, clustered by problem.", style="dim")
    if report.comparison is not None:
        _print_comparison(report.comparison, console)
    for note in report.notes:
        console.print(f"Note: {note}", style="yellow", markup=False)


def _print_comparison(found: Comparison, console: Console) -> None:
    style = {"worse": "bold red", "better": "bold green", "within noise": "bold"}[found.verdict]
    change = found.difference
    console.print(
        f"Verdict: {found.verdict}. Difference {change.value:+.1%} "
        f"[{change.low:+.1%}, {change.high:+.1%}], p = {found.p_value:.3g}, "
        f"alpha = {found.alpha:g}.",
        style=style,
        markup=False,
    )
    console.print(
        f"Test: {found.test}. A true difference of {found.detectable:.1%} would be found in four "
        "of five such runs; smaller ones need more samples.",
        style="dim",
        markup=False,
    )


def _interval(estimate: Estimate) -> str:
    return f"{estimate.value:.1%} [dim]({estimate.low:.1%} to {estimate.high:.1%})[/dim]"
