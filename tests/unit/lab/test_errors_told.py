"""What a user can do wrong is told in one line on stderr, with status 2, before the work is done."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import typer
from safetensors.torch import save_file
from support.plans import PLAIN, make_plan
from typer.testing import CliRunner

from sglang_fp8rl.checkpoint import INDEX_NAME, checkpoint_directory, safetensors_files, tensors_in
from sglang_fp8rl.client import RefitClient
from sglang_fp8rl.errors import Fp8RlError, RefitError
from sglang_fp8rl.lab import cli, export, plan_offline
from sglang_fp8rl.lab.eval import gap
from sglang_fp8rl.lab.eval.mismatch import check_plot_path
from sglang_fp8rl.lab.sensitivity import run as sensitivity_run
from sglang_fp8rl.lab.terminal import BAD_INPUT, INTERRUPTED, errors_told
from sglang_fp8rl.lab.testing.weight_sets import Checkpoint, write_updated

URL = "http://127.0.0.1:9"


def refused(*args) -> str:
    result = CliRunner().invoke(cli.app, [str(arg) for arg in args], env={"TERM": "dumb"})
    assert (result.exit_code, result.stdout) == (BAD_INPUT, ""), repr(result.exception)
    assert "error: " in result.stderr
    assert "Traceback" not in result.stderr
    return result.stderr


@pytest.fixture
def model(tmp_path):
    path = tmp_path / "model"
    path.mkdir()
    (path / "config.json").write_text("{}")
    save_file({"a.weight": torch.zeros(4, 4)}, path / "model.safetensors")
    return path


@pytest.fixture
def truncated(model):
    file = model / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-8])
    return model


@pytest.fixture
def asked_for(monkeypatch):
    """The plans that were asked for: none is made."""
    asked = []

    def make(model, **_):
        asked.append(model)
        return SimpleNamespace(tensors={})

    monkeypatch.setattr(export, "make_plan", make)
    return asked


def test_a_path_that_leads_nowhere_is_no_name_on_the_hub(tmp_path):
    nowhere = tmp_path / "a" / "typo"
    assert checkpoint_directory(str(nowhere)) is None
    assert "no safetensors" in refused("export", nowhere, tmp_path / "out")
    assert "config.json" in refused("plan", nowhere)


def test_a_file_is_no_name_on_the_hub_either(model, monkeypatch):
    monkeypatch.chdir(model)
    monkeypatch.setattr(plan_offline, "run_in_new_interpreter", lambda *_: pytest.fail("a plan"))
    assert "Name a checkpoint's directory" in refused("plan", "model.safetensors")


def test_what_sglang_leaves_behind_goes_with_the_folder_of_the_plan(model, monkeypatch):
    places = []

    def run(args, env, path):
        places.append(path.parent)
        assert env["TMPDIR"] == str(path.parent)
        path.write_text("")
        return "exit status 1"

    monkeypatch.setattr(plan_offline, "run_in_new_interpreter", run)
    refused("plan", model)
    assert not places[0].exists()


@pytest.mark.parametrize("content", [None, "{", "[1]"])
@pytest.mark.parametrize("command", ["plan", "export", "demo", "sensitivity"])
def test_a_folder_without_a_config_that_can_be_read_is_named(tmp_path, model, command, content):
    config = model / "config.json"
    config.unlink()
    if content is not None:
        config.write_text(content)
    args = {"demo": ("--model", model), "export": (model, tmp_path / "out")}
    told = refused(command, *args.get(command, (model,)))
    assert str(model) in told
    assert "config.json" in told


@pytest.mark.parametrize(
    "content", ["{", "[]", "{}", '{"weight_map": 1}', '{"weight_map": {"a": 1}}']
)
def test_a_broken_index_is_named(tmp_path, model, content):
    (model / INDEX_NAME).write_text(content)
    assert INDEX_NAME in refused("export", model, tmp_path / "out")
    assert INDEX_NAME in refused("verify", URL, "--checkpoint", model)


def test_a_truncated_file_is_named(truncated, monkeypatch):
    assert "model.safetensors" in refused("demo", "--model", truncated)
    held = SimpleNamespace(fingerprint=lambda: None, plan=lambda: make_plan({}))
    monkeypatch.setattr("sglang_fp8rl.client.RefitClient", lambda *_, **__: held)
    assert "model.safetensors" in refused("verify", URL, "--checkpoint", truncated)


def test_a_link_that_leads_nowhere_is_named(tmp_path):
    (tmp_path / "gone.safetensors").symlink_to(tmp_path / "nowhere")
    with pytest.raises(Fp8RlError, match=r"gone\.safetensors"):
        list(tensors_in(safetensors_files(tmp_path)))


def test_a_truncated_file_of_a_reference_is_bad_input(truncated):
    from transformers import LlamaConfig

    sizes = {"vocab_size": 8, "hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 1}
    LlamaConfig(**sizes, num_hidden_layers=1).save_pretrained(truncated)
    with pytest.raises(Fp8RlError, match="--model"):
        gap.load_model(str(truncated), "float32", "cpu")


@pytest.mark.parametrize("below", ["", "a", "a/b"])
def test_an_export_into_a_file_is_refused_before_the_plan_is_made(
    tmp_path, model, asked_for, below
):
    (tmp_path / "file").touch()
    assert str(tmp_path / "file") in refused("export", model, tmp_path / "file" / below)
    assert not asked_for


@pytest.mark.parametrize("below", ["", "a/b"])
def test_an_export_that_can_t_be_written_is_refused_before_the_plan_is_made(
    tmp_path, model, asked_for, below, monkeypatch
):
    place = tmp_path / "locked"
    place.mkdir()
    monkeypatch.setattr(os, "access", lambda path, mode: path != place or not mode & os.W_OK)
    assert "can be written" in refused("export", model, place / below)
    assert not asked_for


def test_an_export_that_quantizes_nothing_is_refused(tmp_path, model, asked_for):
    out = tmp_path / "out"
    told = refused("export", model, out, "--options", '{"granularity": "per_channel"}')
    assert "no weight is served in FP8 blocks" in told
    assert asked_for
    assert not out.exists()


@pytest.fixture
def planned(monkeypatch):
    """A plan that quantizes something, though nothing of the model."""
    block = {"is_fp8_on_wire": True, "scheme": "blockwise"}
    plan = SimpleNamespace(tensors={"else": SimpleNamespace(**block)}, document={"options": {}})
    monkeypatch.setattr(export, "make_plan", lambda *_, **__: plan)
    monkeypatch.setattr(export, "quantization_config", lambda _: {})


@pytest.mark.usefixtures("planned")
def test_an_exported_file_of_another_name_has_an_index(tmp_path, model):
    """Without one, transformers looks for model.safetensors alone."""
    (model / "model.safetensors").rename(model / "model-00001-of-00001.safetensors")
    export.export_checkpoint(str(model), tmp_path / "out")
    index = json.loads((tmp_path / "out" / INDEX_NAME).read_text())
    assert index["weight_map"] == {"a.weight": "model-00001-of-00001.safetensors"}


@pytest.mark.usefixtures("planned")
def test_every_part_of_an_exported_config_says_the_dtype_that_was_written(tmp_path, model):
    """SGLang serves a model with a `text_config` in that one's: FP16 where it says `float32`."""
    parts = {
        "text_config": {"dtype": "float32"},
        "vision_config": {"torch_dtype": "float16", "depth": 2},
    }
    (model / "config.json").write_text(json.dumps({**parts, "dtype": "float32"}))
    export.export_checkpoint(str(model), tmp_path / "out")
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert written.pop("quantization_config") == {}
    assert written == {
        "text_config": {"dtype": "bfloat16"},
        "vision_config": {"torch_dtype": "bfloat16", "depth": 2},
        "dtype": "bfloat16",
        "torch_dtype": "bfloat16",
    }


@pytest.fixture
def full_disk():
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (16, limits[1]))  # bytes of any file
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@pytest.mark.usefixtures("planned")
def test_an_export_without_room_names_the_file_and_leaves_no_checkpoint(tmp_path, model, request):
    request.getfixturevalue("full_disk")
    told = refused("export", model, tmp_path / "out")
    assert str(tmp_path / "out" / "model.safetensors") in told
    assert not (tmp_path / "out" / "config.json").exists()


def test_the_second_weights_of_the_demo_without_room_are_named(tmp_path, model, request):
    (model / "config.json").write_text("")
    request.getfixturevalue("full_disk")
    with pytest.raises(Fp8RlError, match=r"second/model\.safetensors: .*Make room"):
        write_updated(Checkpoint(model), tmp_path / "second", lambda _: None)


@pytest.mark.parametrize("content", ['{"a": 1}', "garbage"])
def test_a_tokenizer_that_is_none_is_bad_input(tmp_path, content):
    (tmp_path / "tokenizer.json").write_text(content)
    (tmp_path / "config.json").write_text('{"model_type": "qwen3"}')
    with pytest.raises(Fp8RlError, match=r"--model: .*its tokenizer has to load"):
        gap.load_tokenizer(str(tmp_path))


def test_a_plot_that_can_t_be_written_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "access", lambda path, mode: path != tmp_path)
    with pytest.raises(Fp8RlError, match="a file that can be written"):
        check_plot_path(tmp_path / "a.png")


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("--results", "nowhere/a.jsonl"),
        ("--results", "other"),
        ("--prompts", "nowhere.txt"),
        ("--budget", "abc"),
        ("--budget", "-5%"),
    ],
)
def test_what_sensitivity_is_given_is_looked_at_before_the_model(
    tmp_path, monkeypatch, option, value
):
    (tmp_path / "other").write_text("{}\n")
    monkeypatch.chdir(tmp_path)

    def make(*_, **__):
        raise AssertionError("the plan is made")

    monkeypatch.setattr(sensitivity_run, "make_plan", make)
    told = refused("sensitivity", "model", option, value)
    assert option in told
    assert value in told


def test_prompts_of_a_pipe_which_gives_them_once_are_left_to_the_measurement(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    reading, writing = os.pipe()
    os.write(writing, b"a prompt\n")
    os.close(writing)
    prompts = Path(f"/dev/fd/{reading}")

    def make(*_, **__):
        raise Fp8RlError("plan", repr(prompts.read_text()), "a rule", "A remedy.")

    monkeypatch.setattr(sensitivity_run, "make_plan", make)
    try:
        assert "a prompt" in refused("sensitivity", "model", "--prompts", prompts)
    finally:
        os.close(reading)


def test_a_server_that_is_gone_is_told_before_a_model_is_loaded(monkeypatch):
    monkeypatch.setattr(gap, "load_model", lambda *_: pytest.fail("the model is loaded"))
    told = refused("mismatch", "--url", URL, "--model", "model")
    assert URL in told
    assert "the server did not answer" in told


def check_told_on_a_full_disk(code):
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-c", code], stdout=full, stderr=subprocess.PIPE, text=True
        )
    assert done.returncode == BAD_INPUT
    assert done.stderr.startswith("error: ")
    assert "Traceback" not in done.stderr


def test_a_result_that_can_t_be_printed_is_told():
    code = (
        "from types import SimpleNamespace\n"
        "from sglang_fp8rl.lab import cli, plan_offline\n"
        "plan_offline.make_plan = lambda *_, **__: SimpleNamespace(document={})\n"
        "cli.app(['plan', 'model', '--json'])"
    )
    check_told_on_a_full_disk(code)


@pytest.mark.parametrize("asked", [["--help"], ["--version"], ["plan", "--help"]])
def test_help_that_can_t_be_printed_is_told(asked):
    code = f"from sglang_fp8rl.lab import cli; cli.app({asked})"
    check_told_on_a_full_disk(code)


def test_demo_leaves_nothing_behind_for_a_model_that_is_not_there(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    refused("demo", "--model", tmp_path / "nope")
    assert not list(tmp_path.iterdir())


def test_a_checkpoint_of_other_shapes_is_told_as_such(model, monkeypatch):
    plan = make_plan({"a.weight": (PLAIN, (8, 4))})
    held = SimpleNamespace(fingerprint=lambda: None, plan=lambda: plan)
    monkeypatch.setattr("sglang_fp8rl.client.RefitClient", lambda *_, **__: held)
    told = refused("verify", URL, "--checkpoint", model)
    assert "a.weight: shape (4, 4); a checkpoint of the served model" in told
    assert "LocalShard" not in told


def test_a_server_that_is_only_asked_is_told_nothing_of_updates():
    with pytest.raises(RefitError, match="no answer") as raised:
        RefitClient(URL).status()
    assert "update" not in str(raised.value)


def test_an_error_without_a_remedy_ends_at_its_rule():
    assert str(Fp8RlError("a", "b", "c", "")) == "a: b; c."


LOG = """[2026-01-01] INFO
Traceback (most recent call last):
  File "a.py", line 1, in f
    g()
    ~^^
  File "b.py", line 2, in g
    assert heads % tp == 0
           ^^^^^^^^^^^^^^^
{}
[2026-01-01] ends
"""
# As torch writes it once there is a process group.
RANKS_LOG = """[2026-01-01] INFO
[rank0]: Traceback (most recent call last):
[rank0]:   File "a.py", line 1, in f
[rank0]:     g()
[rank0]:       ^^
[rank0]: ValueError: 3 ranks: it has to be
[rank0]:   1 != 3
[rank0]:[W1 a.cpp:1] Warning: not destroyed
"""
ASSERTED = (
    "[rank0]:     assert heads % tp == 0\n[rank0]:            ^^^^^\n[rank0]: AssertionError\n"
)


@pytest.mark.parametrize(
    ("log", "said"),
    [
        (LOG.format("AssertionError"), "AssertionError: assert heads % tp == 0"),
        (LOG.format("a.b.OwnError: 3 heads"), "a.b.OwnError: 3 heads"),
        (RANKS_LOG, "ValueError: 3 ranks: it has to be 1 != 3"),
        (ASSERTED, "AssertionError: assert heads % tp == 0"),
        ("usage: …\nserver: --dtype: invalid choice\n", "server: --dtype: invalid choice"),
        ("", "its log is empty"),
    ],
)
def test_what_sglang_refuses_is_the_last_exception_of_its_log(tmp_path, monkeypatch, log, said):
    def run(args, env, path):
        path.write_text(log)
        return "exit status 0"

    monkeypatch.setattr(plan_offline, "run_in_new_interpreter", run)
    told = refused("plan", "some/model")
    assert f"did not come to build the model: {said}; SGLang has to build" in told
    assert "exit status" not in told


def test_ctrl_c_while_a_tensor_is_read_is_an_interrupt_though_torch_swallows_it(model, monkeypatch):
    slice_of = torch.UntypedStorage.__getitem__

    def interrupted(storage, at):  # as torch looks at the first byte
        if isinstance(at, slice):
            return slice_of(storage, at)
        raise KeyboardInterrupt

    monkeypatch.setattr(torch.UntypedStorage, "__getitem__", interrupted)
    with pytest.raises(typer.Exit) as left, errors_told():
        dict(tensors_in(safetensors_files(model)))
    assert left.value.exit_code == INTERRUPTED


def test_a_plan_that_is_terminated_takes_its_child_along(tmp_path, monkeypatch):
    before = signal.getsignal(signal.SIGTERM)
    started = []

    class Child(subprocess.Popen):
        def __init__(self, args, **kwargs):
            started.append(self)
            super().__init__(["sleep", "60"], **kwargs)

        def communicate(self, *_, **__):
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(subprocess, "Popen", Child)
    with pytest.raises(SystemExit) as left:
        plan_offline.run_in_new_interpreter([], {}, tmp_path / "log")
    assert left.value.code == 128 + signal.SIGTERM
    assert signal.getsignal(signal.SIGTERM) is before
    assert started[0].wait(5) == -signal.SIGKILL
