"""What every judge's process has before it is forked: the environment, SGLang, and hooks that hand it over."""

from __future__ import annotations

import os
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any, Protocol

from .towers import cut_towers

ENVIRONMENT = {
    "SGLANG_PLATFORM": "fp8rl_cpu",
    "CUDA_VISIBLE_DEVICES": "",
    "OMP_NUM_THREADS": "1",
    "TORCHDYNAMO_DISABLE": "1",
    "SGLANG_CPU_OMP_THREADS_BIND": "0",
    "SGLANG_USE_MESSAGE_QUEUE_BROADCASTER": "false",
    # What is not here is not fetched: a class that asks the hub for something gets a row.
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
}


def prepare_environment() -> None:
    """Before torch and SGLang are imported."""
    os.environ.update(ENVIRONMENT)


class Judged(BaseException):
    """Leaves SGLang's start. Not an `Exception`: SGLang catches those."""


class AtStart(Protocol):
    """Takes part in SGLang's start of one model."""

    def load(self, model_config: Any, load_config: Any) -> Any:
        """Return the loaded model, in place of SGLang's loader."""

    def started(self, runner: Any) -> None:
        """SGLang has its caches and attention backends, and could serve."""

    def failed(self, error: Exception) -> None:
        """SGLang's start ended in an error."""


present: list[AtStart] = []
_MAMBA = "sglang.srt.arg_groups.mamba_hook"
_SETUP = "sglang.srt.model_executor.model_runner_components.attention_backend_setup"


def _load(loader: Any, *, model_config: Any, **_: Any) -> Any:
    return present[-1].load(model_config, loader.load_config)


def _start(original: Callable[..., Any], scheduler: Any, *args: Any, **kwargs: Any) -> None:
    try:
        original(scheduler, *args, **kwargs)
    except Exception as error:  # noqa: BLE001  whatever it is, it is the class's row
        present[-1].failed(error)
    else:
        present[-1].started(scheduler.tp_worker.model_runner)
    raise Judged


def _attention_of_the_cpu(result: Any, *_: Any, **__: Any) -> Any:
    """Some models ask for one of SGLang's GPU backends by name; what they make with it is the same."""
    is_gpu = "triton" in (result.prefill, result.decode)
    cpu = "torch_native"
    return type(result)(prefill=cpu, decode=cpu) if is_gpu else result


def _rope_of_a_gpu(*args: Any) -> Any:
    """On a CPU, SGLang has MLA's rotary embedding for one kind of scaling only."""
    from sglang.srt.layers.rotary_embedding import factory

    return factory.get_rope(*args[:8])


def _yes() -> bool:
    """SGLang asks whether a Mamba state can be snapshot before it builds Inkling; building it needs none."""
    return True


def import_sglang() -> None:
    """Everything that takes seconds, once for all processes that are forked from this one.

    Side effects on the host: who is `present` loads the model in place of SGLang's loader of dummy weights, and
    has it when SGLang could serve it; then the start is left.
    """
    from sglang.benchmark import one_batch  # noqa: F401
    from sglang.srt.plugins import load_plugins
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from sglang_fp8rl.lab.testing import preload  # noqa: F401

    load = "sglang.srt.model_loader.loader.DummyModelLoader.load_model"
    HookRegistry.register(load, _load, HookType.REPLACE)
    start = "sglang.srt.managers.scheduler.Scheduler.init_model_worker"
    HookRegistry.register(start, _start, HookType.AROUND)
    rope = "sglang.srt.layers.rotary_embedding.factory.get_rope_cpu"
    HookRegistry.register(rope, _rope_of_a_gpu, HookType.REPLACE)
    if find_spec(_MAMBA):
        HookRegistry.register(
            f"{_MAMBA}._platform_supports_mamba_cache_extra_buffer", _yes, HookType.REPLACE
        )
    if find_spec(_SETUP):  # older versions have it elsewhere
        HookRegistry.register(
            f"{_SETUP}.resolve_attention_backend_strs", _attention_of_the_cpu, HookType.AFTER
        )
    cut_towers()
    load_plugins()
    HookRegistry.apply_hooks()
