"""What the developer's tools say to arguments that no run has."""

import pytest
import typer
from typer.testing import CliRunner

from tools.fuzz import __main__ as fuzz
from tools.random_loading import __main__ as random_loading


@pytest.mark.parametrize(
    ("tool", "args"),
    [
        (fuzz, ["--steps", "0"]),
        (fuzz, ["--steps=-5"]),
        (random_loading, ["400"]),
        (random_loading, ["400", "0"]),
        (random_loading, ["400", "--", "-3"]),
        (random_loading, ["a", "b"]),
    ],
)
def test_no_run_is_a_wrong_argument_and_no_success(tool, args):
    app = typer.Typer()
    app.command()(tool.main)
    told = CliRunner().invoke(app, args)
    assert told.exit_code == 2
    assert "Error" in told.stderr
