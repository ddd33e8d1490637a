"""The flag, wherever SGLang takes it: the Python `Engine`, and `ServerArgs` of a veRL process."""

from __future__ import annotations

import sys
from importlib.metadata import version

import pytest
from packaging.version import Version
from support.engine.forked import WithoutPlugins, run_forked
from support.engine.models import checkpoint
from support.paths import SUPPORT
from support.server.served import (
    MODEL,
    ONE_THREAD,
    PROMPTS,
    QUANTIZED,
    engine_paths,
    engine_run,
    read_engine_run,
    run_script,
    served,
)

from sglang_fp8rl.lab.testing.outputs import differences
from sglang_fp8rl.lab.testing.server import cpu_env

pytestmark = [pytest.mark.engine, pytest.mark.timeout(1200), pytest.mark.xdist_group("server")]


def test_the_python_engine_serves_and_refits(server, checkpoint_dir):
    """It was started on the second weights and updated to those the server was started on."""
    engine = engine_run(checkpoint_dir)
    assert [success for success, _ in engine.answers] == [True, True]
    for state in engine.status:
        assert state["consistent"], state["problems"]
        assert state["schemes"] == {"blockwise": 8}
    assert engine.status[1]["last_refit"]["complete"]
    assert differences(engine.updated, served(server, checkpoint_dir).expected["first"]) == []
    assert len(differences(engine.fresh, engine.updated)) == len(PROMPTS)


@pytest.mark.slow
def test_in_an_interpreter_of_its_own_that_imports_nothing_of_ours_it_is_the_same(checkpoint_dir):
    """And its workers are spawned, as a user's are."""
    script = SUPPORT / "server" / "engine_script.py"
    env = {**cpu_env(), **ONE_THREAD}
    result = run_script([str(script), *engine_paths(checkpoint_dir)], env=env)
    assert result.returncode == 0, result.stderr[-4000:]
    spawned, forked = read_engine_run(result.stdout), engine_run(checkpoint_dir)
    assert differences(spawned.fresh, forked.fresh) == []
    assert differences(spawned.updated, forked.updated) == []
    assert [success for success, _ in spawned.answers] == [True, True]


VERL_PROGRAM = """
import importlib.metadata, sys
if sys.argv[2]:
    real = importlib.metadata.version
    importlib.metadata.version = lambda name: sys.argv[2] if name == "sglang" else real(name)
import verl
if not sys.argv[2]:  # what the server actor of ours does before veRL's own code
    from verl.workers.rollout.replica import get_rollout_replica_class
    print("replica:", get_rollout_replica_class("sglang").__module__)
    from sglang_fp8rl.verl_rollout.server import prepare_actor
    prepare_actor()
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.layers.quantization import QUANTIZATION_METHODS
from sglang.srt.server_args import ServerArgs
print("registered:", "fp8_blockwise_online" in QUANTIZATION_METHODS)
args = ServerArgs(
    model_path=sys.argv[1], quantization="fp8_blockwise_online", skip_tokenizer_init=True
)
print("built:", args.quantization)
print("model config:", ModelConfig.from_server_args(args).quantization)
"""


def run_verl_program(*args):
    """In a fork that has SGLang imported; `make verl-short` has veRL's own processes."""
    sys.argv[1:] = args
    exec(compile(VERL_PROGRAM, "verl_program", "exec"), {"__name__": "__main__"})


def verl_program(checkpoint_dir, pretended_version=""):
    """A process that wants veRL's rollout by SGLang, and builds `ServerArgs` as its server actor.

    Returns:
        how it ended, and what it said.
    """
    path = str(checkpoint(checkpoint_dir, MODEL, "first"))
    log = checkpoint_dir / f"verl{pretended_version}.log"
    args, env = [path, pretended_version], cpu_env()
    how = run_forked(run_verl_program, args, log, env=env, process_class=WithoutPlugins)
    return how, log.read_text()


def test_server_args_know_the_method_where_verl_serves(checkpoint_dir):
    how, output = verl_program(checkpoint_dir)
    assert how == "exit status 0", output[-4000:]
    said = [line for line in output.splitlines() if ": " in line]
    assert "replica: sglang_fp8rl.verl_rollout.server" in said
    assert "registered: True" in said
    assert "built: fp8_blockwise_online" in said
    assert "model config: fp8_blockwise_online" in said


def test_on_an_unsupported_sglang_nothing_is_registered_and_sglang_refuses_the_flag(checkpoint_dir):
    """The same program as above, so the test above can fail."""
    how, output = verl_program(checkpoint_dir, "0.5.99")
    assert how == "exit status 1", output[-4000:]
    assert "registered: False" in output
    assert "Unknown quantization method: fp8_blockwise_online" in output
    assert "fp8rl registers nothing with veRL: sglang 0.5.99 is outside" in output
    # 0.5.16 looks the method up while it builds ServerArgs; newer ones a moment later.
    assert ("built:" in output) == (Version(version("sglang")) > Version("0.5.16"))


@pytest.mark.slow
def test_an_unknown_method_is_refused_by_the_launcher(checkpoint_dir):
    path = str(checkpoint(checkpoint_dir, MODEL, "first"))
    wrong = QUANTIZED.replace("online", "offline")
    args = ["-m", "sglang.launch_server", f"--model-path={path}", wrong]
    result = run_script(args, env=cpu_env())
    assert result.returncode != 0
    assert "invalid choice: 'fp8_blockwise_offline'" in result.stderr
    assert "fp8_blockwise_online" in result.stderr
