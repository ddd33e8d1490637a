"""What the logs say: avg@n, pass@k, and the comparison of two endpoints."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ...errors import EvaluationError
from .stats import Comparison, Estimate, compare_paired, estimate_mean, pass_at_k
from .task import SCORER

if TYPE_CHECKING:
    from inspect_ai.log import EvalLog


@dataclass(frozen=True)
class ArmReport:
    """One endpoint's results.

    Attributes:
        correct: correct responses of each problem, in the order of the data set.
        avg_at_n: share of correct responses, mean over problems.
        pass_at_k: for k = 1, 2, 4, ... and n.
        truncated, no_answer: shares that ran into the token limit, or have no recognizable final answer.
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


def build_report(logs: Sequence[EvalLog], samples: int, alpha: float) -> EvalReport:
    """Summarize the first log, and compare it with the second if there is one."""
    arms = [_arm(log, samples, 1 - alpha) for log in logs]
    candidate, baseline, comparison = arms[0], None, None
    if len(arms) > 1:
        baseline, ours = arms[1], list(candidate.correct.values())
        theirs = [baseline.correct[name] for name in candidate.correct]
        comparison = compare_paired(ours, theirs, samples, alpha)
    return EvalReport(len(candidate.correct), samples, 1 - alpha, candidate, baseline, comparison)


def _arm(log: EvalLog, samples: int, confidence: float) -> ArmReport:
    settings, taken = log.eval.metadata or {}, log.samples or []
    total = len(taken)
    statuses: Counter[str] = Counter()
    correct = {str(sample.id): 0 for sample in taken}
    for sample in taken:
        status = ((sample.scores or {})[SCORER].metadata or {})["status"]
        statuses[status] += 1
        correct[str(sample.id)] += status == "correct"
    if total != samples * len(correct):
        found, rule = f"{total} samples of {len(correct)} problems", f"each has {samples}"
        raise EvaluationError(log.location, found, rule, "Give another --out.")

    def estimate(values: list[float]) -> Estimate:
        return estimate_mean(values, total, confidence)

    usages = [sample.output.usage for sample in taken]
    tokens = [usage.output_tokens for usage in usages if usage is not None]
    powers = (2**i for i in range(samples.bit_length()))
    return ArmReport(
        endpoint=settings["url"],
        served=settings["served"],
        correct=correct,
        avg_at_n=estimate([count / samples for count in correct.values()]),
        pass_at_k={
            k: estimate([pass_at_k(count, samples, k) for count in correct.values()])
            for k in sorted({*powers, samples})
        },
        truncated=sum(sample.output.stop_reason == "max_tokens" for sample in taken) / total,
        no_answer=statuses["no_answer"] / total,
        grading_timeouts=statuses["timeout"],
        mean_tokens=sum(tokens) / total if len(tokens) == total else None,
    )


def print_report(report: EvalReport, console: Console) -> None:
    """Show the report as a table and, for two arms, a verdict with what it rests on."""
    arms = [arm for arm in (report.candidate, report.baseline) if arm is not None]
    table = Table(title=f"{report.problems} problems, {report.samples} samples each")
    table.add_column("")
    for arm, role in zip(arms, ("candidate", "baseline"), strict=False):
        table.add_column(escape(f"{role}\n{arm.endpoint}\n{arm.served['model']}"), justify="right")
    table.add_row(f"avg@{report.samples}", *(_interval(arm.avg_at_n) for arm in arms))
    for k in report.candidate.pass_at_k:
        table.add_row(f"pass@{k}", *(_interval(arm.pass_at_k[k]) for arm in arms))
    table.add_row("truncated", *(f"{arm.truncated:.1%}" for arm in arms))
    table.add_row("no answer found", *(f"{arm.no_answer:.1%}" for arm in arms))
    table.add_row("grading timeouts", *(str(arm.grading_timeouts) for arm in arms))
    means = ("unknown" if a.mean_tokens is None else f"{a.mean_tokens:.0f}" for a in arms)
    table.add_row("tokens per response", *means)
    console.print(table)
    console.print(f"Intervals: {100 * report.confidence:.4g}%, clustered by problem.", style="dim")
    if report.comparison is None:
        return
    found, change = report.comparison, report.comparison.difference
    style = {"worse": "bold red", "better": "bold green", "within noise": "bold"}[found.verdict]
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
