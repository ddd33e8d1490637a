"""`sglang-fp8rl eval-aime`: AIME-style accuracy of a served model, against a baseline if given."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from ..errors import ConfigError, Fp8RlError
from .client import CompletionClient, Sampling, normalize_url
from .grading import Grader
from .problems import Problem, load_problems
from .report import EvalReport, build_report, print_report
from .results import ResultsFile
from .sampling import PROMPT_TEMPLATE, OnSample, ignore_sample, take_samples

WORSE, BAD_INPUT, INTERRUPTED = 1, 2, 130


@dataclass(frozen=True)
class EvalOptions:
    """Everything that a run depends on.

    Attributes:
        url, baseline_url: the servers; with a baseline the run ends in a verdict.
        problems: JSON lines file or Hugging Face dataset id; `split` of the latter.
        samples: n, per problem and server.
        out: results file, continued if it exists.
        template: put around each statement; `{problem}` is where it goes.
        alpha: level of the test; intervals have confidence 1 - alpha.
    """

    url: str
    problems: str
    out: Path
    baseline_url: str | None = None
    split: str | None = None
    samples: int = 16
    sampling: Sampling = field(default_factory=Sampling)
    api: Literal["chat", "generate"] = "chat"
    concurrency: int = 64
    timeout: float = 3600.0
    template: str = PROMPT_TEMPLATE
    alpha: float = 0.05
    api_key: str | None = field(default=None, repr=False)
    retries: int = 3
    backoff: float = 1.0

    def __post_init__(self) -> None:
        checks = (
            ("--n", self.samples, self.samples >= 1, "at least 1"),
            ("--concurrency", self.concurrency, self.concurrency >= 1, "at least 1"),
            ("--timeout", self.timeout, self.timeout > 0, "above 0"),
            ("--alpha", self.alpha, 0 < self.alpha < 1, "between 0 and 1"),
            ("--endpoint", self.api, self.api in ("chat", "generate"), "`chat` or `generate`"),
            ("--url-baseline", self.baseline_url, self._arms_differ(), "another URL than --url"),
        )
        for name, value, good, rule in checks:
            if not good:
                raise ConfigError(name, str(value), f"it is {rule}", "Choose another value.")
        _check_template(self.template)

    @property
    def endpoints(self) -> list[str]:
        urls = [self.url] if self.baseline_url is None else [self.url, self.baseline_url]
        return [normalize_url(url) for url in urls]

    def _arms_differ(self) -> bool:
        return len(set(self.endpoints)) == len(self.endpoints)


def run_eval(
    options: EvalOptions,
    *,
    grader: Grader | None = None,
    on_start: Callable[[dict[str, int]], OnSample] = lambda totals: ignore_sample,
) -> EvalReport:
    """Take the missing samples, grade them, and report. Blocks; not from inside an event loop.

    Args:
        grader: one that is running already, left open; by default one is started and ended.
        on_start: given the samples to come of each endpoint, returns what is called for each one.

    Raises:
        Fp8RlError: bad problems or options (before anything is sent), a server that fails, a
            results file that can't be continued. What was sampled stays in `options.out`.

    Side Effects:
        Appends to `options.out`.
    """
    problems = load_problems(options.problems, split=options.split)
    with contextlib.ExitStack() as stack:
        grader = grader or stack.enter_context(Grader())
        for problem in problems:
            grader.check_reference(f"problem {problem.id!r}", problem.answer)
        results = stack.enter_context(ResultsFile(options.out))
        on_sample = on_start(dict.fromkeys(options.endpoints, len(problems) * options.samples))
        asyncio.run(_sample(options, problems, results, grader, on_sample))
        return build_report(results, problems, options.samples, options.endpoints, options.alpha)


async def _sample(
    options: EvalOptions,
    problems: list[Problem],
    results: ResultsFile,
    grader: Grader,
    on_sample: OnSample,
) -> None:
    async with contextlib.AsyncExitStack() as stack:
        clients = []
        for endpoint in options.endpoints:
            client = CompletionClient(
                endpoint,
                options.api,
                options.sampling,
                api_key=options.api_key,
                timeout=options.timeout,
                concurrency=options.concurrency,
                retries=options.retries,
                backoff=options.backoff,
            )
            clients.append(await stack.enter_async_context(client))
        # Every server is asked who it is before the first sample is taken from any.
        served = [await client.identify() for client in clients]
        for client, identity in zip(clients, served, strict=True):
            settings = {
                **asdict(options.sampling),
                "api": options.api,
                "template": options.template,
                "served": identity,
            }
            results.begin_session(client.url, settings)
        await take_samples(
            clients,
            problems,
            options.samples,
            results,
            grader,
            template=options.template,
            concurrency=options.concurrency,
            on_sample=on_sample,
        )


def eval_aime(
    url: Annotated[str, typer.Option(help="Server to evaluate, e.g. http://127.0.0.1:30000.")],
    problems: Annotated[
        str, typer.Option(help="JSON lines with `problem` and `answer`, or a dataset id.")
    ],
    url_baseline: Annotated[
        str | None, typer.Option(help="Server to compare with, e.g. the BF16 one.")
    ] = None,
    split: Annotated[str | None, typer.Option(help="Split of a Hugging Face dataset.")] = None,
    n: Annotated[int, typer.Option("--n", "-n", help="Samples per problem and server.")] = 16,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 1.0,
    top_p: Annotated[float, typer.Option(help="Nucleus; 0.7 is DAPO's for validation.")] = 0.7,
    max_tokens: Annotated[int, typer.Option(help="Limit of one response.")] = 20480,
    endpoint: Annotated[
        str, typer.Option(help="`chat` (applies the chat template) or `generate` (raw text).")
    ] = "chat",
    template: Annotated[
        str, typer.Option(help="Prompt; `{problem}` is replaced, other braces are doubled.")
    ] = PROMPT_TEMPLATE,
    concurrency: Annotated[int, typer.Option(help="Requests in flight per server.")] = 64,
    timeout: Annotated[float, typer.Option(help="Seconds for one response.")] = 3600.0,
    alpha: Annotated[float, typer.Option(help="Level of the test against the baseline.")] = 0.05,
    api_key: Annotated[
        str | None, typer.Option(envvar="OPENAI_API_KEY", help="Bearer token of the servers.")
    ] = None,
    out: Annotated[
        Path, typer.Option(help="Results, appended; an existing file is continued.")
    ] = Path("aime-results.jsonl"),
    as_json: Annotated[bool, typer.Option("--json", help="Report as JSON on stdout.")] = False,
) -> None:
    """Score a served model on AIME-style problems, with n samples each.

    Interrupted? Run the same command again: what --out holds is not sampled twice.
    Exit status: 0; 1 if the verdict against the baseline is "worse"; 2 for bad input or a server
    that fails; 130 if interrupted.
    """
    messages = Console(stderr=True)
    try:
        options = EvalOptions(
            url=url,
            problems=problems,
            out=out,
            baseline_url=url_baseline,
            split=split,
            samples=n,
            sampling=Sampling(temperature, top_p, max_tokens),
            api=endpoint,  # type: ignore[arg-type]  # checked by EvalOptions
            concurrency=concurrency,
            timeout=timeout,
            template=template,
            alpha=alpha,
            api_key=api_key,
        )
        with _progress(messages) as bars:
            report = run_eval(options, on_start=lambda totals: _bars(bars, totals))
    except Fp8RlError as error:
        messages.print(f"error: {error}", style="red", markup=False, soft_wrap=True)
        raise typer.Exit(BAD_INPUT) from error
    except KeyboardInterrupt as error:
        messages.print(f"interrupted; {out} keeps what was sampled, the same command resumes")
        raise typer.Exit(INTERRUPTED) from error
    if as_json:
        typer.echo(json.dumps(report.as_dict()))
    else:
        print_report(report, Console())
    if report.comparison is not None and report.comparison.verdict == "worse":
        raise typer.Exit(WORSE)


def _progress(console: Console) -> Progress:
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[correct]} correct"),
        TimeRemainingColumn(),
    )
    return Progress(*columns, console=console)


def _bars(progress: Progress, totals: dict[str, int]) -> OnSample:
    tasks = {url: progress.add_task(url, total=total, correct=0) for url, total in totals.items()}
    hits = dict.fromkeys(totals, 0)

    def on_sample(endpoint: str, correct: bool) -> None:
        hits[endpoint] += correct
        progress.update(tasks[endpoint], advance=1, correct=hits[endpoint])

    return on_sample


def _check_template(template: str) -> None:
    try:
        good = "\0" in template.format(problem="\0")
    except (KeyError, IndexError, ValueError):
        good = False
    if not good:
        raise ConfigError(
            "--template",
            repr(template),
            "it holds {problem}, and every other brace twice",
            "Example: '{problem} Answer in \\boxed{{}}.'",
        )
