"""The one list of host symbols that we touch, checked by kind and version. Imports no host."""

from __future__ import annotations

import importlib
import importlib.metadata
import inspect
from dataclasses import dataclass

from packaging.version import Version

OLDEST, NEWEST_EXCLUDED = Version("0.5.16"), Version("0.5.24")
TESTED = ("0.5.16", "0.5.23")
SESSIONS_SINCE = Version("0.5.21")


@dataclass(frozen=True)
class Symbol:
    """One thing of SGLang that this package uses.

    Attributes:
        module, name: where it is; `name` may be `Class.method`.
        kind: `class`, `function`, `dict` or `list`.
        since: the first version that has it.
    """

    module: str
    name: str
    kind: str
    since: Version = OLDEST


_UPDATER = "sglang.srt.managers.scheduler_components.weight_updater"
SYMBOLS = (
    Symbol("sglang.srt.plugins.hook_registry", "HookRegistry.register", "function"),
    Symbol("sglang.srt.layers.quantization", "QUANTIZATION_METHODS", "dict"),
    Symbol("sglang.srt.layers.linear", "WEIGHT_LOADER_V2_SUPPORTED", "list"),
    Symbol("sglang.srt.layers.linear", "LinearBase", "class"),
    Symbol("sglang.srt.layers.linear", "QKVParallelLinear", "class"),
    Symbol("sglang.srt.layers.linear", "MergedColumnParallelLinear", "class"),
    Symbol("sglang.srt.layers.parameter", "ModelWeightParameter", "class"),
    Symbol("sglang.srt.layers.parameter", "ChannelQuantScaleParameter", "class"),
    Symbol("sglang.srt.layers.quantization.fp8", "Fp8Config", "class"),
    Symbol("sglang.srt.layers.quantization.fp8", "Fp8LinearMethod.create_weights", "function"),
    Symbol("sglang.srt.layers.quantization.fp8_utils", "apply_fp8_linear", "function"),
    Symbol("sglang.srt.layers.quantization.unquant", "UnquantizedLinearMethod", "class"),
    Symbol("sglang.srt.model_loader.loader", "_initialize_model", "function"),
    Symbol("sglang.srt.model_loader.weight_utils", "default_weight_loader", "function"),
    Symbol(_UPDATER, "SchedulerWeightUpdaterManager.update_weights_from_tensor", "function"),
    Symbol(_UPDATER, "SchedulerWeightUpdaterManager.update_weights_from_distributed", "function"),
    Symbol(_UPDATER, "SchedulerWeightUpdaterManager.update_weights_from_disk", "function"),
    Symbol(_UPDATER, "SchedulerWeightUpdaterManager.update_weights_from_ipc", "function"),
    Symbol(_UPDATER, "SchedulerWeightUpdaterManager.release_memory_occupation", "function"),
    Symbol(
        _UPDATER, "SchedulerWeightUpdaterManager.begin_weight_update", "function", SESSIONS_SINCE
    ),
    Symbol(_UPDATER, "SchedulerWeightUpdaterManager.end_weight_update", "function", SESSIONS_SINCE),
    Symbol(
        "sglang.srt.model_executor.model_runner_components.weight_updater",
        "WeightUpdater._update_weights_from_flattened_bucket",
        "function",
    ),
    Symbol("sglang.srt.runtime_context", "get_server_args", "function"),
    Symbol("sglang.srt.managers.scheduler", "Scheduler.get_internal_state", "function"),
    Symbol("sglang.srt.managers.tokenizer_manager", "TokenizerManager.__init__", "function"),
    Symbol("sglang.srt.managers.io_struct", "GetInternalStateReq", "class"),
    Symbol("sglang.srt.entrypoints.http_server", "get_global_state", "function"),
)

_KINDS = {
    "class": inspect.isclass,
    "function": callable,
    "dict": lambda value: isinstance(value, dict),
    "list": lambda value: isinstance(value, list),
}


def host_version() -> Version | None:
    """The installed SGLang, or None."""
    try:
        return Version(importlib.metadata.version("sglang"))
    except importlib.metadata.PackageNotFoundError:
        return None


def check_host() -> list[str]:
    """Why this SGLang can't be served with; empty if it can. Cheap: imports no SGLang."""
    version = host_version()
    if version is None:
        return ["sglang is not installed; pip install 'sglang-fp8rl[sglang]'"]
    if not OLDEST <= version < NEWEST_EXCLUDED:
        return [
            f"sglang {version} is outside the supported range >={OLDEST},<{NEWEST_EXCLUDED}; "
            "install a version in it, or a sglang-fp8rl that supports yours"
        ]
    return []


def check_symbols() -> list[str]:
    """Host symbols that are missing or of another kind than expected. Imports SGLang."""
    version = host_version()
    problems = []
    for symbol in SYMBOLS:
        if version is not None and version < symbol.since:
            continue
        value: object = importlib.import_module(symbol.module)
        for part in symbol.name.split("."):
            value = getattr(value, part, None)
        if value is None or not _KINDS[symbol.kind](value):
            problems.append(
                f"{symbol.module}.{symbol.name}: expected a {symbol.kind}, found {value!r}"
            )
    return problems
