"""`sglang-fp8rl eval-aime`: AIME-style accuracy of a served model, against a baseline if given."""

from __future__ import annotations

import contextlib
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..terminal import FOUND_WRONG, JsonFlag, console, errors_told, print_json
from .grading import Grader, require_packages
from .options import PROMPT_TEMPLATE, EvalOptions
from .problems import load_problems
from .server import identify

if TYPE_CHECKING:
    from .report import EvalReport


def run_eval(options: EvalOptions, grader: Grader | None = None) -> EvalReport:
    """Take the missing samples, grade them, and report. Blocks; not from inside an event loop.

    Args:
        grader: one that is running already, left open; by default one is started and ended.

    Raises:
        Fp8RlError: bad problems (before anything is sent), a server that fails, logs that can't be
            continued. What was sampled stays in Inspect's logs, in `options.out`.
    """
    require_packages()
    from .report import build_report
    from .task import take_samples

    problems = load_problems(options.problems, options.split, options.template)
    with contextlib.ExitStack() as stack:
        stack.enter_context(contextlib.redirect_stdout(sys.stderr))  # what Inspect displays
        grader = grader or stack.enter_context(Grader())
        for problem in problems:
            grader.check_reference(f"problem {problem.id!r}", str(problem.target))
        # Every server is asked who it is before the first sample is taken from any.
        served = {url: identify(url, options.api_key) for url in options.endpoints}
        logs = take_samples(served, problems, options, grader)
    return build_report(logs, options.samples, options.alpha)


def eval_aime(
    url: Annotated[str, typer.Option(help="Server to evaluate, e.g. http://127.0.0.1:30000.")],
    problems: Annotated[
        str, typer.Option(help="JSON lines with `problem` and `answer`, or a dataset id.")
    ],
    baseline_url: Annotated[
        str | None,
        typer.Option("--url-baseline", help="Server to compare with, e.g. the BF16 one."),
    ] = None,
    split: Annotated[str, typer.Option(help="Split of a Hugging Face dataset.")] = "train",
    samples: Annotated[int, typer.Option("--n", "-n", help="Samples per problem and server.")] = 16,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 1.0,
    top_p: Annotated[float, typer.Option(help="Nucleus; 0.7 is DAPO's for validation.")] = 0.7,
    max_tokens: Annotated[int, typer.Option(help="Limit of one response.")] = 20480,
    template: Annotated[
        str, typer.Option(help="Prompt; `{problem}` is replaced, other braces are doubled.")
    ] = PROMPT_TEMPLATE,
    concurrency: Annotated[int, typer.Option(help="Requests in flight, over all servers.")] = 64,
    timeout: Annotated[float, typer.Option(help="Seconds for one response.")] = 3600.0,
    alpha: Annotated[float, typer.Option(help="Level of the test against the baseline.")] = 0.05,
    api_key: Annotated[
        str | None,
        typer.Option(
            envvar=["SGLANG_API_KEY", "OPENAI_API_KEY"], help="Bearer token of the servers."
        ),
    ] = None,
    out: Annotated[
        Path, typer.Option(help="Folder of Inspect's logs; what it holds is continued.")
    ] = Path("aime-logs"),
    as_json: JsonFlag = False,
) -> None:
    """Score a served model on AIME-style problems, with n samples each.

    Interrupted? Run the same command again: what --out holds is not sampled twice.
    Exit status: 0; 1 if the verdict against the baseline is "worse"; 2 for bad input or a server
    that fails; 130 if interrupted.
    """
    given = dict(locals())  # the parameters are called as the options of a run are
    del given["as_json"]
    kept = f"interrupted; {out} keeps what was sampled, the same command resumes"
    with errors_told(interrupted=kept):
        report = run_eval(EvalOptions(**given))
    if as_json:
        print_json(asdict(report))
    else:
        from .report import print_report

        print_report(report, console())
    if report.comparison is not None and report.comparison.verdict == "worse":
        raise typer.Exit(FOUND_WRONG)
