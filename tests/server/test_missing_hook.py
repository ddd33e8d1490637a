"""A host symbol that is gone ends the start of this method, by name, and of no other.

SGLang's own way up to where a model would be built, with one symbol renamed. In forks of a process
that has SGLang imported, which takes seconds, and once in an interpreter of its own.
"""

from __future__ import annotations

import inspect

import pytest
from support.engine.forked import WithoutPlugins, run_forked
from support.engine.models import MODELS, checkpoint
from support.server.served import run_script

from sglang_fp8rl.lab.testing.server import cpu_env

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900), pytest.mark.xdist_group("server")]

METHOD = "fp8_blockwise_online"
UPDATER = "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"
UPDATE = f"{UPDATER}.update_weights_from_tensor"
OF_THE_CPU_PLATFORM = "sglang.srt.layers.quantization.fp8_utils.block_quant_to_tensor_quant"


def configure(path: str, method: str, gone: str) -> None:
    """In a process of its own: rename the symbol, load the plugins, ask for the method."""
    import pkgutil

    if gone:
        owner, _, name = gone.rpartition(".")
        owner = pkgutil.resolve_name(owner)
        setattr(owner, name + "_renamed", getattr(owner, name))
        delattr(owner, name)
    from sglang.srt.plugins import load_plugins

    load_plugins()
    from sglang.srt.configs.load_config import LoadConfig
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.model_loader.loader import _get_quantization_config
    from sglang.srt.server_args import ServerArgs

    args = ServerArgs(model_path=path, quantization=method, skip_tokenizer_init=True, device="cpu")
    config = _get_quantization_config(ModelConfig.from_server_args(args), LoadConfig())
    print("configured:", config.get_name(), flush=True)


def in_a_fork(log, *args):
    return run_forked(configure, args, log, process_class=WithoutPlugins)


@pytest.fixture
def model_path(checkpoint_dir):
    return str(checkpoint(checkpoint_dir, MODELS["qwen3"], "first"))


def is_refused(gone: str, output: str) -> bool:
    last = output.strip().splitlines()[-1]
    return last.startswith(f"sglang_fp8rl.errors.HostError: {gone}: not hooked in sglang")


def test_with_every_symbol_there_the_method_starts(model_path, tmp_path):
    """The same as below, so that the tests below can fail."""
    log = tmp_path / "log"
    assert in_a_fork(log, model_path, METHOD, "") == "exit status 0", log.read_text()
    assert f"configured: {METHOD}" in log.read_text()


@pytest.mark.parametrize("gone", [UPDATE, OF_THE_CPU_PLATFORM])
def test_a_symbol_that_is_gone_ends_the_start_and_is_named(model_path, tmp_path, gone):
    log = tmp_path / "log"
    assert in_a_fork(log, model_path, METHOD, gone) == "exit status 1"
    assert "configured:" not in log.read_text()
    assert is_refused(gone, log.read_text()), log.read_text()


def test_another_method_starts_without_the_symbol(model_path, tmp_path):
    log = tmp_path / "log"
    assert in_a_fork(log, model_path, "fp8", UPDATE) == "exit status 0", log.read_text()
    assert "configured: fp8" in log.read_text()


@pytest.mark.slow
def test_in_an_interpreter_of_its_own_it_is_the_same(model_path):
    program = f"{inspect.getsource(configure)}\nconfigure({model_path!r}, {METHOD!r}, {UPDATE!r})"
    result = run_script(["-W", "ignore", "-c", program], env=cpu_env())
    assert result.returncode != 0
    assert "configured:" not in result.stdout
    assert is_refused(UPDATE, result.stderr)
