"""`sglang-fp8rl eval-aime`: AIME-style accuracy of a served model, against a baseline if given."""

from __future__ import annotations

import contextlib
import importlib.util
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ...errors import ConfigError
from ...terminal import FOUND_WRONG, JsonFlag, console, errors_told
from .grading import Grader
from .problems import PROMPT_TEMPLATE, check_template, load_problems
from .server import identify, normalize_url

if TYPE_CHECKING:
    from .report import EvalReport


@dataclass(frozen=True)
class EvalOptions:
    """Everything that a run depends on.

    Attributes:
        url, baseline_url: the servers; with a baseline the run ends in a verdict.
        problems: JSON lines file or Hugging Face dataset id; `split` of the latter.
        samples: n, per problem and server.
        out: folder of Inspect logs, continued if it has some.
        template: put around each statement; `{problem}` is where it goes.
        alpha: level of the test; intervals have confidence 1 - alpha.
        concurrency, timeout, retries, api_key: see `task.Requests`.
    """

    url: str
    problems: str
    out: Path
    baseline_url: str | None = None
    split: str = "train"
    samples: int = 16
    temperature: float = 1.0
    top_p: float = 0.7
    max_tokens: int = 20480
    concurrency: int = 64
    timeout: float = 3600.0
    retries: int = 3
    template: str = PROMPT_TEMPLATE
    alpha: float = 0.05
    api_key: str | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        urls = self.endpoints
        checks = (
            ("--n", self.samples, self.samples >= 1, "at least 1"),
            ("--temperature", self.temperature, self.temperature >= 0, "at least 0"),
            ("--top-p", self.top_p, 0 < self.top_p <= 1, "above 0 and at most 1"),
            ("--max-tokens", self.max_tokens, self.max_tokens >= 1, "at least 1"),
            ("--concurrency", self.concurrency, self.concurrency >= 1, "at least 1"),
            ("--timeout", self.timeout, self.timeout >= 1, "at least 1 second"),
            ("--alpha", self.alpha, 0 < self.alpha < 1, "between 0 and 1"),
            ("--url-baseline", urls[-1], len(set(urls)) == len(urls), "another URL than --url"),
        )
        for name, value, good, rule in checks:
            if not good:
                raise ConfigError(name, str(value), f"it is {rule}", "Choose another value.")
        check_template(self.template)

    @property
    def endpoints(self) -> list[str]:
        urls = [self.url] if self.baseline_url is None else [self.url, self.baseline_url]
        return [normalize_url(url) for url in urls]


def run_eval(options: EvalOptions, grader: Grader | None = None) -> EvalReport:
    """Take the missing samples, grade them, and report. Blocks; not from inside an event loop.

    Args:
        grader: one that is running already, left open; by default one is started and ended.

    Raises:
        Fp8RlError: bad problems or options (before anything is sent), a server that fails, logs
            that can't be continued. What was sampled stays in `options.out`.

    Side Effects:
        Writes Inspect's logs to `options.out`, and its progress to stderr.
    """
    _require_inspect()
    from .report import build_report
    from .task import Arm, Requests, Sampling, take_samples

    problems = load_problems(options.problems, options.split, options.template)
    with contextlib.ExitStack() as stack:
        grader = grader or stack.enter_context(Grader())
        for problem in problems:
            grader.check_reference(f"problem {problem.id!r}", str(problem.target))
        # Every server is asked who it is before the first sample is taken from any.
        arms = [Arm(url, identify(url, options.api_key)) for url in options.endpoints]
        requests = Requests(options.concurrency, options.timeout, options.retries, options.api_key)
        sampling = Sampling(options.temperature, options.top_p, options.max_tokens)
        logs = take_samples(
            arms, problems, options.samples, sampling, requests, options.out, grader
        )
    return build_report([logs[arm.url] for arm in arms], options.samples, options.alpha)


def _require_inspect() -> None:
    if importlib.util.find_spec("inspect_ai") is None:
        raise ConfigError(
            "eval-aime",
            "no module `inspect_ai`",
            "samples are taken by Inspect",
            'Install "sglang-fp8rl[lab]".',
        )


def eval_aime(
    url: Annotated[str, typer.Option(help="Server to evaluate, e.g. http://127.0.0.1:30000.")],
    problems: Annotated[
        str, typer.Option(help="JSON lines with `problem` and `answer`, or a dataset id.")
    ],
    url_baseline: Annotated[
        str | None, typer.Option(help="Server to compare with, e.g. the BF16 one.")
    ] = None,
    split: Annotated[str, typer.Option(help="Split of a Hugging Face dataset.")] = "train",
    n: Annotated[int, typer.Option("--n", "-n", help="Samples per problem and server.")] = 16,
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
        str | None, typer.Option(envvar="OPENAI_API_KEY", help="Bearer token of the servers.")
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
    kept = f"interrupted; {out} keeps what was sampled, the same command resumes"
    with errors_told(interrupted=kept):
        options = EvalOptions(
            url=url,
            problems=problems,
            out=out,
            baseline_url=url_baseline,
            split=split,
            samples=n,
            temperature=temperature,
            top_p=top_p,
            max_tokens=max_tokens,
            concurrency=concurrency,
            timeout=timeout,
            template=template,
            alpha=alpha,
            api_key=api_key,
        )
        report = run_eval(options)
    if as_json:
        typer.echo(json.dumps(report.as_dict()))
    else:
        from .report import print_report

        print_report(report, console())
    if report.comparison is not None and report.comparison.verdict == "worse":
        raise typer.Exit(FOUND_WRONG)
