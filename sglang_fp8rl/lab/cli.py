"""`sglang-fp8rl`: verify, and the lab's commands. Imports torch and SGLang when needed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .. import __version__
from ..errors import ConfigError, RefitError
from .commands import add_commands
from .terminal import (
    FOUND_WRONG,
    AdminApiKey,
    ApiKey,
    JsonFlag,
    TellingGroup,
    console,
    errors_told,
    print_json,
)

if TYPE_CHECKING:
    from ..wire.fingerprint import Verification

app = typer.Typer(
    cls=TellingGroup,
    help="FP8 rollout for RL on SGLang: every weight update is re-quantized in place, exactly.",
    epilog="Exit status: 0 fine; 1 something is wrong; 2 bad input or a server failed; "
    "130 interrupted.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def _print_version(value: bool) -> None:
    if value:
        typer.echo(__version__)
        raise typer.Exit()


@app.callback()
def main(
    version: Annotated[
        bool,
        typer.Option(
            "--version", help="Print it and leave.", callback=_print_version, is_eager=True
        ),
    ] = False,
) -> None:
    """FP8 rollout for RL on SGLang."""


@app.command()
def verify(
    urls: Annotated[list[str], typer.Argument(help="Servers, e.g. http://127.0.0.1:30000.")],
    checkpoint: Annotated[
        Path | None, typer.Option(help="Directory of the weights that they should serve.")
    ] = None,
    api_key: ApiKey = None,
    admin_api_key: AdminApiKey = None,
    as_json: JsonFlag = False,
) -> None:
    """Prove what servers hold: against themselves, each other, and a checkpoint. Sends no weights.

    Exit status: 0 if no byte differs; 1 with the name of every tensor that does; 2 if a server or the
    checkpoint can't be read.
    """
    with errors_told(), console(stderr=True).status("reading what is served"):
        comparisons = verify_servers(urls, checkpoint, api_key, admin_api_key)
    if as_json:
        rows = [{"server": one, "with": other, **how.as_dict()} for one, other, how in comparisons]
        print_json(rows)
    else:
        for server, other, found in comparisons:
            wrong = "DIFFERENT" if found.differing or found.missing else "UNKNOWN"
            verdict = "the same bytes" if found.ok else wrong
            counts = f"{found.compared} tensors compared, {len(found.unproven)} not proven"
            typer.echo(f"{server} and {other}: {verdict} ({counts})")
            of_kind = {
                "differs": found.differing,
                "missing": found.missing,
                "not proven": found.unproven,
            }
            for kind, names in of_kind.items():
                for name, text in names.items():
                    typer.echo(f"  {kind}: {name}: {text}")
    if not all(found.ok for _, _, found in comparisons):
        raise typer.Exit(FOUND_WRONG)


def verify_servers(
    urls: Sequence[str], checkpoint: Path | None, api_key: str | None, admin_api_key: str | None
) -> list[tuple[str, str, Verification]]:
    """Compare every server with the checkpoint, or with itself if there is none, and with the first one.

    Servers that store a tensor otherwise (another tensor-parallel size may cut it otherwise) have other
    bytes by design; such names are `unproven` between them, and proven against a checkpoint.

    Returns:
        Server, what it was compared with (itself: its replicas and derived weights), and what was found.

    Raises:
        ConfigError: no such checkpoint (FP32, BF16, FP16 or block-FP8).
        RefitError: a server that does not answer, or serves otherwise; a checkpoint of another model.
    """
    from ..checkpoint import safetensors_files, tensors_in
    from ..client import RefitClient
    from ..trainer import fingerprint_of
    from ..wire.fingerprint import compare

    files = safetensors_files(checkpoint) if checkpoint is not None else []
    if checkpoint is not None and not files:
        raise ConfigError(
            str(checkpoint), "no safetensors", "a checkpoint is a directory of them", "Name one."
        )
    clients = [RefitClient(url, api_key=api_key, admin_api_key=admin_api_key) for url in urls]
    served = [client.fingerprint() for client in clients]
    expected, comparisons = {}, []
    for url, client, held in zip(urls, clients, served, strict=True):
        if checkpoint is None:
            comparisons.append((url, "itself", compare(held, held)))
            continue
        plan = client.plan()
        if plan.digest not in expected:
            try:
                made = fingerprint_of(tensors_in(files), plan, source=str(checkpoint))
            except RefitError as error:
                if not error.value.startswith("shape "):
                    raise
                rule = f"a checkpoint of the served model has the shapes of its plan: {error.rule}"
                remedy = "Compare with the checkpoint that was sent."
                raise RefitError(error.subject, error.value, rule, remedy) from error
            expected[plan.digest] = made
        comparisons.append((url, str(checkpoint), compare(held, expected[plan.digest])))
    for url, held in zip(urls[1:], served[1:], strict=True):
        comparisons.append((url, urls[0], compare(held, served[0])))
    return comparisons


add_commands(app)
