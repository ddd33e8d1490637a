"""The command line: quick to start, and clear about what is wrong."""

from __future__ import annotations

import json
import tempfile
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest
import typer
from support.python import printed_by
from typer.testing import CliRunner

from sglang_fp8rl import __version__, compat
from sglang_fp8rl.errors import Fp8RlError
from sglang_fp8rl.lab import cli, doctor
from sglang_fp8rl.lab.demo.show import DemoReport
from sglang_fp8rl.lab.plan_table import grouped
from sglang_fp8rl.lab.terminal import BAD_INPUT, FOUND_WRONG, INTERRUPTED, errors_told
from sglang_fp8rl.lab.testing.checkpoints import make_checkpoint
from sglang_fp8rl.lab.testing.outputs import Output, differences, make_prompts
from sglang_fp8rl.lab.testing.weight_sets import Checkpoint, masters, updated, write_updated

RUNNER = CliRunner()

URL = "http://127.0.0.1:9"
# Of each command: arguments that it takes, and the function that does its work.
COMMANDS = {
    "demo": ("sglang_fp8rl.lab.demo.run.run_demo", []),
    "doctor": ("sglang_fp8rl.lab.doctor.examine", []),
    "plan": ("sglang_fp8rl.lab.plan_offline.make_plan", ["model"]),
    "export": ("sglang_fp8rl.lab.export.export_checkpoint", ["model", "out"]),
    "verify": ("sglang_fp8rl.lab.cli.verify_servers", [URL]),
    "eval-aime": ("sglang_fp8rl.lab.eval.aime.run_eval", ["--url", URL, "--problems", "problems"]),
    "mismatch": ("sglang_fp8rl.lab.eval.gap.run_mismatch", ["--url", URL, "--model", "model"]),
    "sensitivity": ("sglang_fp8rl.lab.sensitivity.run.run_sensitivity", ["model"]),
}


def run(*args: str):
    return RUNNER.invoke(cli.app, list(args), env={"COLUMNS": "200", "TERM": "dumb"})


@pytest.fixture
def run_into(monkeypatch, tmp_path):
    """Runs a command whose work ends in the error; its temporary files go to `tmp_path`."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    def run_command(command: str, error: BaseException):
        def work(*args, **kwargs):
            raise error

        function, args = COMMANDS[command]
        monkeypatch.setattr(function, work)
        return run(command, *args)

    return run_command


def test_every_command_is_among_those_that_are_run_into_errors():
    registered = cli.app.registered_commands
    assert {one.name or one.callback.__name__ for one in registered} == COMMANDS.keys()


@pytest.mark.parametrize("command", COMMANDS)
def test_ctrl_c_ends_every_command_with_its_own_status(run_into, command):
    result = run_into(command, KeyboardInterrupt())
    assert (result.exit_code, result.stdout) == (INTERRUPTED, "")


def test_ctrl_c_in_an_export_says_what_is_left(run_into):
    told = run_into("export", KeyboardInterrupt()).stderr
    assert "is no checkpoint; the next try needs an empty folder" in told


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_tells_an_error_on_stderr_letter_by_letter(run_into, command):
    result = run_into(command, Fp8RlError("[red]w[/red]", "a:100:b " * 40, "a rule", "A remedy."))
    assert (result.exit_code, result.stdout) == (BAD_INPUT, "")
    told = f"error: [red]w[/red]: {'a:100:b ' * 40}; a rule. A remedy.\n"
    assert told in result.stderr


@pytest.mark.parametrize("command", ["plan", "export", "sensitivity"])
@pytest.mark.parametrize(
    ("options", "rule"),
    [("{misaligned: bf16}", "it has to be JSON"), ("[1]", "it has to be a JSON object")],
)
def test_options_that_are_no_json_object_are_told(command, options, rule):
    result = run(command, *COMMANDS[command][1], "--options", options)
    assert (result.exit_code, result.stdout) == (BAD_INPUT, "")
    assert f"error: --options: {options!r}; {rule}" in result.stderr


def test_demo_keeps_and_names_its_files_when_it_fails(run_into, tmp_path):
    result = run_into("demo", Fp8RlError("a", "b", "c", "d"))
    [kept] = tmp_path.iterdir()
    assert f"Files of this run: {kept}\n" in result.stderr


def test_demo_leaves_nothing_behind_when_it_is_stopped(run_into, tmp_path):
    run_into("demo", KeyboardInterrupt())
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("error", "status", "told"),
    [
        (Fp8RlError("a", "b", "c", "d"), BAD_INPUT, "error: a: b; c. d\nlook there\n"),
        (KeyboardInterrupt(), INTERRUPTED, "go on\n"),
    ],
)
def test_what_is_said_fits_how_a_command_ended(capsys, error, status, told):
    with pytest.raises(typer.Exit) as left, errors_told("look there", interrupted="go on"):
        raise error
    assert left.value.exit_code == status
    assert capsys.readouterr().err == told


def test_errors_that_nobody_raised_on_purpose_keep_their_traceback():
    with pytest.raises(ZeroDivisionError), errors_told():
        1 / 0  # noqa: B018


@pytest.mark.parametrize("args", [["--help"], ["demo", "--help"], ["--version"]])
def test_help_imports_neither_torch_nor_sglang(args):
    code = (
        "import sys\nfrom sglang_fp8rl.lab.cli import app\n"
        f"try: app({args!r})\n"
        "except SystemExit as end: assert not end.code, end.code\n"
        "heavy = {'torch', 'sglang', 'transformers', 'numpy'} & set(sys.modules)\n"
        "print(sorted(heavy))"
    )
    *said, heavy = printed_by(code).splitlines()
    assert heavy == "[]"
    assert "".join(said).strip()


def test_the_version_is_the_package_s():
    assert run("--version").stdout.strip() == __version__


def test_every_command_is_listed_and_has_its_exit_status_documented():
    listed = run("--help").stdout
    for command in COMMANDS:
        assert command in listed
        assert "Exit status" in run(command, "--help").stdout


def test_demo_refuses_a_checkpoint_that_is_quantized_already(tmp_path):
    (tmp_path / "config.json").write_text('{"quantization_config": {"quant_method": "awq"}}')
    (tmp_path / "model.safetensors").touch()
    result = run("demo", "--model", str(tmp_path))
    assert result.exit_code == BAD_INPUT
    assert "awq" in result.output


def test_doctor_s_table_shows_brackets_as_they_are(monkeypatch):
    said = [(doctor.NOTE, "install sglang-fp8rl[lab], see [/opt]")]
    monkeypatch.setattr(doctor, "_CHECKS", (("a check", lambda: said),))
    assert said[0][1] in run("doctor").stdout


@pytest.mark.parametrize("value", ["", "0", "False", "no", "1", "True"])
def test_doctor_reads_a_switch_of_sglang_s_as_sglang_does(monkeypatch, value):
    from sglang.srt.utils.common import get_bool_env_var

    monkeypatch.setenv("SGLANG_FORCE_FP8_MARLIN", value)
    is_on = get_bool_env_var("SGLANG_FORCE_FP8_MARLIN")
    monkeypatch.setattr(doctor, "_CHECKS", (("environment", doctor._environment),))
    assert run("doctor").exit_code == (FOUND_WRONG if is_on else 0)


@pytest.mark.parametrize(("state", "status"), [(doctor.OK, 0), (doctor.PROBLEM, 1)])
def test_doctor_s_exit_status_says_whether_something_is_in_the_way(monkeypatch, state, status):
    monkeypatch.setattr(doctor, "_CHECKS", (("a check", lambda: iter([(state, "a finding")])),))
    result = run("doctor", "--json")
    assert result.exit_code == status
    answer = json.loads(result.stdout)
    assert answer["ok"] is (status == 0)
    assert answer["findings"] == [{"check": "a check", "state": state, "detail": "a finding"}]
    assert ("does not fit (a finding)" in answer["verdict"]) is (status == 1)


FITS = [
    doctor.Finding("SGLang", doctor.OK, "sglang 0.5.23, tested"),
    doctor.Finding("device", doctor.NOTE, "no GPU"),
    doctor.Finding("tensor sharing", doctor.OK, "by file_system"),
    doctor.Finding("trainer", doctor.OK, "verl 0.9.1, tested"),
]


def test_doctor_s_last_line_is_the_verdict_and_json_has_it(monkeypatch):
    checks = [(check, lambda said=(state, text): [said]) for check, state, text in FITS]
    monkeypatch.setattr(doctor, "_CHECKS", tuple(checks))
    line = (
        "this machine fits (no GPU), this SGLang fits (sglang 0.5.23, tested), "
        "this trainer fits (verl 0.9.1, tested)"
    )
    assert run("doctor").stdout.splitlines()[-1] == line
    assert json.loads(run("doctor", "--json").stdout)["verdict"] == line


@pytest.mark.parametrize("kind", [ImportError, AttributeError, OSError, RuntimeError])
def test_an_sglang_that_can_t_be_imported_is_told_and_no_traceback(monkeypatch, kind):
    """As one whose files another package has overwritten, or that wants another torch."""

    def broken():
        raise kind("cannot import name 'one'")

    monkeypatch.setattr(doctor, "_CHECKS", (("plugin", broken), ("casts", doctor._casts)))
    result = run("doctor", "--json")
    assert result.exit_code == 1
    first, *others = json.loads(result.stdout)["findings"]
    assert (first["check"], first["state"]) == ("plugin", doctor.PROBLEM)
    assert "cannot import name 'one'; " in first["detail"]
    assert others


@pytest.mark.parametrize(
    ("check", "subject"),
    [
        ("environment", "machine"),
        ("tensor sharing", "machine"),
        ("device", "machine"),
        ("SGLang", "SGLang"),
        ("plugin", "SGLang"),
        ("host symbols", "SGLang"),
        ("trainer", "trainer"),
    ],
)
def test_what_does_not_fit_is_told_with_its_first_reasons(check, subject):
    problems = [doctor.Finding(check, doctor.PROBLEM, text) for text in ("one", "two", "three")]
    said = doctor.verdict([*FITS, *problems[:2]])
    assert f"this {subject} does not fit (one; two)" in said
    assert said.count("does not fit") == 1
    said = doctor.verdict([*FITS, *problems, *problems])
    assert f"this {subject} does not fit (one; two; 4 more, above)" in said


@pytest.mark.parametrize(
    ("there", "state", "text"),
    [
        ({}, doctor.OK, "none is installed here"),
        ({"verl": "0.9.1"}, doctor.OK, "verl 0.9.1, tested"),
        ({"verl": "0.9.4"}, doctor.OK, "verl 0.9.4; 0.9.1 is"),
        ({"verl": "0.10"}, doctor.PROBLEM, "pip install --no-deps verl==0.9.1"),
        ({"trl": "1.16.0"}, doctor.NOTE, "docs/recipes"),
        ({"miles-rl": "0.0.2"}, doctor.PROBLEM, "install SGLang again"),
    ],
)
def test_doctor_says_which_trainer_is_here_and_whether_it_fits(monkeypatch, there, state, text):
    """miles' wheel on the registry has SGLang's files in it, and installs them over those that are there."""
    monkeypatch.setattr(compat.importlib.metadata, "version", version_in(there))
    files = [Path("sglang/__init__.py"), Path("miles/__init__.py")]
    monkeypatch.setattr(
        doctor.importlib.metadata, "files", lambda name: files if name == "miles-rl" else None
    )
    assert any(found == state and text in detail for found, detail in doctor._trainer())


def version_in(there: dict[str, str]):
    def version(name: str) -> str:
        if name not in there:
            raise PackageNotFoundError(name)
        return there[name]

    return version


def test_doctor_says_why_a_host_outside_the_range_is_not_served(monkeypatch):
    monkeypatch.setattr(doctor, "check_host", lambda: ["sglang 9.9 is outside the range"])
    found = [line for check in (doctor._host, doctor._symbols, doctor._plugin) for line in check()]
    assert found[0] == (doctor.PROBLEM, "sglang 9.9 is outside the range")
    assert {state for state, _ in found[1:]} == {doctor.NOTE}


def test_doctor_names_environment_variables_that_lead_astray(monkeypatch):
    monkeypatch.setenv("SGLANG_USE_CPU_ENGINE", "1")
    ((state, detail),) = doctor._environment()
    assert state == doctor.PROBLEM
    assert "SGLANG_USE_CPU_ENGINE" in detail


def test_a_plan_puts_layers_that_are_alike_into_one_row():
    rows = [(0, "blockwise"), (1, "blockwise"), (2, "per_channel"), (3, "blockwise")]
    plan = [
        {"module": f"model.layers.{number}.mlp.down_proj", "scheme": scheme, "reason": ""}
        for number, scheme in rows
    ] + [{"module": "lm_head", "scheme": "high_precision", "reason": "ignored"}]
    plan.append({**plan[0], "module": "model.layers.4.mlp.down_proj", "activations": "bf16"})
    assert grouped(plan) == [
        ("model.layers.{0-1,3}.mlp.down_proj", "blockwise", ""),
        ("model.layers.2.mlp.down_proj", "per_channel", ""),
        ("lm_head", "high_precision", "ignored"),
        ("model.layers.4.mlp.down_proj", "blockwise, bf16 activations", ""),
    ]


def test_a_difference_is_found_and_named():
    base = Output((1, 2), (None, -1.0, -2.0))
    other_token, other_logprob = Output((1, 3), base.logprobs), Output((1, 2), (None, -1.0, -2.5))
    assert differences([base, base], [base, base]) == []
    assert differences([base, other_token], [base, base]) == ["prompt 2: token 1 is 3, expected 2"]
    assert differences([other_logprob], [base]) == [
        "prompt 1: log-probability 2 is -2.5, expected -2.0"
    ]


def test_prompts_are_seeded_and_inside_the_vocabulary():
    assert make_prompts(100) == make_prompts(100)
    assert max(max(prompt) for prompt in make_prompts(100)) < 100


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_the_written_second_weights_are_what_is_sent_up_to_the_bf16_step(tmp_path: Path, dtype):
    import torch

    first = Checkpoint(
        make_checkpoint(tmp_path / "first", shards=2, dtype=getattr(torch, dtype))
    ).check()
    done: list[int] = []
    second = write_updated(first, tmp_path / "second", done.append)
    sent, written, old = dict(updated(first)), dict(second.tensors()), dict(masters(first))
    assert sent.keys() == written.keys() == old.keys()
    assert first.nbytes == sum(4 * tensor.numel() for tensor in sent.values())
    assert len(done) == 2
    assert 0 < done[0] < done[1] == first.nbytes
    for name, tensor in sent.items():
        assert tensor.dtype == torch.float32
        assert torch.equal(tensor.bfloat16(), written[name].bfloat16())
        assert not torch.equal(tensor, old[name])


@pytest.mark.parametrize(("found", "status"), [([], 0), (["prompt 1: token 0 is 1"], 1)])
def test_demo_leaves_with_1_and_keeps_its_files_if_an_output_differs(monkeypatch, found, status):
    from sglang_fp8rl.lab.demo import run as demo_run
    from sglang_fp8rl.lab.demo.show import RefitFigures

    refit = RefitFigures("update", 1, 4, 1, 1.0, 0.5)

    def run_demo(model, directory, screen):
        return DemoReport(
            model="m", device="d", sglang="s", torch="t", refits=[refit], checks={"c": found},
            directory=str(directory),
        )  # fmt: skip

    monkeypatch.setattr(demo_run, "run_demo", run_demo)
    result = run("demo", "--json")
    assert result.exit_code == status
    report = json.loads(result.stdout.splitlines()[-1])
    assert report["ok"] is (status == 0)
    directory = Path(report["directory"])
    assert directory.exists() is (status == 1)
    if directory.exists():
        directory.rmdir()


def test_verify_says_which_server_does_not_answer_and_which_directory_is_no_checkpoint(tmp_path):
    result = run("verify", "http://127.0.0.1:9")
    assert result.exit_code == BAD_INPUT
    assert "127.0.0.1:9" in result.output
    result = run("verify", "http://127.0.0.1:9", "--checkpoint", str(tmp_path))
    assert result.exit_code == BAD_INPUT
    assert "no safetensors" in result.output
