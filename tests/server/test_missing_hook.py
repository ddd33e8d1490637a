"""A host symbol that is gone ends the start of this method, by name, and of no other."""

from __future__ import annotations

import pytest
from _served import run_script
from models import MODELS, checkpoint

from sglang_fp8rl.testing.server import cpu_env

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

# SGLang's own way up to where a model would be built, in one process, with one symbol renamed.
PROGRAM = """
import pkgutil, sys
path, method, symbol = sys.argv[1:]
if symbol:
    owner, _, name = symbol.rpartition(".")
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
print("configured:", config.get_name())
"""
UPDATER = "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"


def start(checkpoint_dir, method: str, symbol: str):
    path = str(checkpoint(checkpoint_dir, MODELS["qwen3"], "first"))
    return run_script(["-W", "ignore", "-c", PROGRAM, path, method, symbol], env=cpu_env())


def test_with_every_symbol_there_the_method_starts(checkpoint_dir):
    """The same program as below, so that the tests below can fail."""
    result = start(checkpoint_dir, "fp8_blockwise_online", "")
    assert result.returncode == 0, result.stderr[-4000:]
    assert "configured: fp8_blockwise_online" in result.stdout


@pytest.mark.parametrize(
    "symbol",
    [
        f"{UPDATER}.update_weights_from_tensor",
        pytest.param(  # of the CPU platform
            "sglang.srt.layers.quantization.fp8_utils.block_quant_to_tensor_quant",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_symbol_that_is_gone_ends_the_start_and_is_named(checkpoint_dir, symbol):
    result = start(checkpoint_dir, "fp8_blockwise_online", symbol)
    assert result.returncode != 0
    assert "configured:" not in result.stdout
    last = result.stderr.strip().splitlines()[-1]
    assert last.startswith(f"sglang_fp8rl.errors.HostError: {symbol}: not hooked in SGLang")


@pytest.mark.slow
def test_another_method_starts_without_the_symbol(checkpoint_dir):
    result = start(checkpoint_dir, "fp8", f"{UPDATER}.update_weights_from_tensor")
    assert result.returncode == 0, result.stderr[-4000:]
    assert "configured: fp8" in result.stdout
