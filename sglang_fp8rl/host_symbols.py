"""Everything of SGLang that this package uses: what it imports, hooks, overrides and looks up.

A test reads the package's sources and compares, both ways; another runs `check_symbols()`, as
`sglang-fp8rl doctor` does. Importing this imports no host.
"""

from __future__ import annotations

import inspect
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from packaging.version import Version

from .compat import SESSIONS_SINCE, host_version

Kind = Literal["module", "class", "function", "dict", "list", "text", "object"]


@dataclass(frozen=True)
class Symbol:
    """One thing of SGLang that this package uses.

    Attributes:
        module, name: where it is; `name` may be `Class.method`.
        kind: what it has to be; an `object` is anything but None.
        since: the first version known to have it; None if every supported one does.
        until: the first version known to be without it.
    """

    module: str
    name: str
    kind: Kind
    since: Version | None = None
    until: Version | None = None

    @property
    def path(self) -> str:
        return f"{self.module}.{self.name}"

    def is_in(self, version: Version) -> bool:
        """Whether an SGLang of that version has it."""
        begun = self.since is None or version >= self.since
        return begun and (self.until is None or version < self.until)


_V22, _V23 = Version("0.5.22"), Version("0.5.23")
_MANAGER = "SchedulerWeightUpdaterManager"

# module, kind, names, and where they are not in every supported version: since, until
_Row = tuple[str, Kind, str] | tuple[str, Kind, str, Version | None, Version | None]
_TABLE: dict[str, tuple[_Row, ...]] = {
    "plugins, arguments and workers": (
        ("plugins", "function", "load_plugins"),
        ("plugins.hook_registry", "class", "HookRegistry HookType"),
        ("plugins.hook_registry", "function", "HookRegistry.register HookRegistry.apply_hooks"),
        ("server_args", "class", "PortArgs"),
        ("server_args", "function", "PortArgs.init_new add_quantization_method_choices"),
        ("server_args", "function", "prepare_server_args"),
        ("runtime_context", "function", "get_parallel get_server_args"),
        ("distributed", "module", "parallel_state"),
        ("distributed.parallel_state", "function", "get_tensor_model_parallel_world_size"),
        ("distributed.parallel_state", "function", "get_attn_tp_group"),
        ("distributed.parallel_state", "function", "get_moe_expert_parallel_world_size"),
        ("managers", "module", "io_struct scheduler"),
        ("managers.scheduler", "function", "run_scheduler_process Scheduler.get_internal_state"),
        ("managers.scheduler", "function", "Scheduler.flush_cache"),
        ("model_executor.model_runner", "function", "ModelRunner.configure_kv_cache_dtype"),
        ("model_executor.forward_context", "class", "ForwardContext"),
        ("model_executor.forward_context", "function", "forward_context"),
        (
            "model_executor.forward_batch_info",
            "class",
            "CaptureHiddenMode ForwardBatch ForwardMode",
        ),
        ("utils.hf_transformers_utils", "function", "get_tokenizer"),
        ("managers.tokenizer_manager", "function", "TokenizerManager.__init__"),
        ("managers.io_struct", "class", "GetInternalStateReq"),
        ("entrypoints.http_server", "function", "get_global_state"),
        ("entrypoints.http_server", "object", "app"),
        ("entrypoints.engine", "function", "Engine._launch_subprocesses"),
        ("weight_sync.utils", "function", "_preprocess_tensor_for_update_weights"),
        ("constants", "text", "GPU_MEMORY_TYPE_WEIGHTS GPU_MEMORY_TYPE_KV_CACHE"),
        ("utils", "function", "set_weight_attrs"),
    ),
    "weight updates": (
        *(
            ("managers.scheduler_components.weight_updater", "function", f"{_MANAGER}.{name}")
            for name in (
                "update_weights_from_tensor",
                "update_weights_from_distributed",
                "update_weights_from_disk",
                "update_weights_from_ipc",
                "release_memory_occupation",
                "get_weights_by_name",
                "check_weights",
                "save_remote_model",
                "save_sharded_model",
            )
        ),
        (
            "managers.scheduler_components.weight_updater",
            "function",
            f"{_MANAGER}.begin_weight_update {_MANAGER}.end_weight_update",
            SESSIONS_SINCE,
            None,
        ),
        (
            "model_executor.model_runner_components.weight_updater",
            "function",
            "WeightUpdater._update_weights_from_flattened_bucket",
        ),
        ("managers.io_struct", "class", "BeginWeightUpdateReqOutput", SESSIONS_SINCE, None),
        ("managers.io_struct", "class", "UpdateWeightsFromTensorReqOutput"),
        ("managers.io_struct", "class", "UpdateWeightsFromDistributedReqOutput"),
        ("managers.io_struct", "class", "UpdateWeightFromDiskReqOutput"),
        ("managers.io_struct", "class", "UpdateWeightsFromIPCReqOutput"),
        ("managers.io_struct", "class", "BeginWeightUpdateReqInput", SESSIONS_SINCE, None),
        ("managers.io_struct", "class", "EndWeightUpdateReqInput", SESSIONS_SINCE, None),
        ("managers.io_struct", "class", "EndWeightUpdateReqOutput", SESSIONS_SINCE, None),
    ),
    "building and loading a model": (
        ("model_loader.loader", "function", "_initialize_model"),
        ("model_loader.utils", "function", "get_model_architecture"),
        ("model_loader.utils", "function", "should_deepgemm_weight_requant_ue8m0"),
        ("model_loader.weight_utils", "function", "default_weight_loader"),
        ("models.deepseek_common", "module", "deepseek_weight_loader"),
        (
            "models.deepseek_common.deepseek_weight_loader",
            "function",
            "_resolve_layer_weight_block_size",
            _V23,
            None,
        ),
    ),
    "layers": (
        ("layers", "module", "linear"),
        ("layers.linear", "list", "WEIGHT_LOADER_V2_SUPPORTED"),
        ("layers.linear", "class", "LinearBase QKVParallelLinear MergedColumnParallelLinear"),
        ("layers.linear", "class", "RowParallelLinear"),
        ("layers.parameter", "class", "ChannelQuantScaleParameter ModelWeightParameter"),
        ("layers.attention.vision", "class", "VisionAttention"),
        ("layers.attention.attention_registry", "function", "register_attention_backend"),
        ("layers.attention.torch_native_backend", "class", "TorchNativeAttnBackend"),
        (
            "layers.attention.torch_native_backend",
            "function",
            "TorchNativeAttnBackend._run_sdpa_forward_extend "
            "TorchNativeAttnBackend._run_sdpa_forward_decode",
        ),
        ("layers.radix_attention", "class", "RadixAttention"),
        ("layers.layernorm", "class", "RMSNorm"),
        ("models.llama", "class", "LlamaDecoderLayer LlamaAttention"),
        ("models.qwen2", "class", "Qwen2DecoderLayer Qwen2Attention"),
        ("models.mixtral", "class", "MixtralDecoderLayer MixtralAttention"),
        ("models.qwen3", "class", "Qwen3DecoderLayer Qwen3Attention"),
        ("models.qwen3_moe", "class", "Qwen3MoeDecoderLayer Qwen3MoeAttention"),
        ("layers.moe.fused_moe_triton", "class", "FusedMoE FusedMoeWeightScaleSupported"),
        ("layers.moe.fused_moe_triton", "object", "FusedMoeWeightScaleSupported.CHANNEL"),
        ("layers.moe.moe_runner.triton", "class", "TritonMoeQuantInfo"),
        ("layers.moe.utils", "function", "get_moe_runner_backend"),
    ),
    "quantization": (
        ("layers.quantization", "dict", "QUANTIZATION_METHODS"),
        ("layers.quantization.base_config", "class", "QuantizeMethodBase"),
        ("layers.quantization.fp8", "class", "Fp8Config Fp8LinearMethod Fp8MoEMethod"),
        ("layers.quantization.fp8", "function", "Fp8Config.get_name Fp8Config.from_config"),
        ("layers.quantization.fp8", "function", "Fp8Config.get_min_capability"),
        ("layers.quantization.fp8", "function", "Fp8Config.get_quant_method"),
        *(
            ("layers.quantization.fp8", "function", f"{method}.{name}")
            for method in ("Fp8LinearMethod", "Fp8MoEMethod")
            for name in ("create_weights", "process_weights_after_loading", "apply")
        ),
        ("layers.quantization.fp8", "function", "Fp8MoEMethod.create_moe_runner"),
        ("layers.quantization.fp8", "function", "Fp8MoEMethod.get_triton_quant_info"),
        ("layers.quantization.fp8_utils", "function", "apply_fp8_linear transform_scale_ue8m0"),
        (
            "layers.quantization.fp8_utils",
            "function",
            "deepgemm_w8a8_block_fp8_linear_with_fallback",
        ),
        ("layers.quantization.unquant", "class", "UnquantizedLinearMethod"),
        ("layers.quantization.unquant", "class", "UnquantizedFusedMoEMethod"),
    ),
    "the CPU reference platform": (
        ("platforms.device_mixin", "class", "DeviceCapability PlatformEnum"),
        ("platforms.device_mixin", "object", "PlatformEnum.OOT"),
        ("platforms.interface", "class", "SRTPlatform"),
        *(
            ("platforms.interface", "function", f"SRTPlatform.{name}")
            for name in (
                "apply_server_args_defaults",
                "empty_cache",
                "get_available_memory",
                "get_current_memory_usage",
                "get_default_attention_backend",
                "get_device",
                "get_device_capability",
                "get_device_name",
                "get_device_total_memory",
                "get_device_uuid",
                "get_paged_allocator_cls",
                "get_torch_profiler_activity",
                "get_torch_profiler_activity_str",
                "init_backend",
                "set_device",
            )
        ),
        ("platforms.interface", "function", "SRTPlatform.get_kv_pool_cls", _V22, None),
        ("platforms.interface", "function", "SRTPlatform.get_mha_kv_pool_cls", None, _V22),
        ("platforms.interface", "function", "SRTPlatform.get_mla_kv_pool_cls", None, _V22),
        ("mem_cache.allocator.token", "class", "TokenToKVPoolAllocator"),
        ("mem_cache.memory_pool", "class", "MHATokenToKVPool MLATokenToKVPool"),
        ("layers.quantization.fp8_utils", "function", "dispatch_w8a8_block_fp8_linear"),
        ("layers.quantization.fp8_utils", "function", "block_quant_to_tensor_quant"),
        ("layers.quantization.fp8_utils", "function", "block_quant_dequant"),
        ("layers.moe.moe_runner.triton_utils.fused_moe", "function", "fused_experts"),
        ("layers.moe.fused_moe_native", "function", "moe_forward_native"),
        ("utils.patch_torch", "function", "monkey_patch_torch_reductions"),
        ("distributed.parallel_state", "function", "init_model_parallel_group"),
        ("configs.update_config", "function", "adjust_config_with_unaligned_cpu_tp"),
        (
            "models.deepseek_common.attention_backend_handler",
            "function",
            "AttentionBackendRegistry.register",
        ),
        (
            "models.deepseek_common.attention_forward_methods.forward_methods",
            "object",
            "AttnForwardMethod.MLA",
        ),
    ),
    "real servers for tests and the demo": (
        ("entrypoints.engine", "function", "_set_envs_and_config"),
        ("models.registry", "function", "ModelRegistry.get_supported_archs"),
        ("utils", "function", "kill_itself_when_parent_died"),
    ),
}

SYMBOLS: tuple[Symbol, ...] = (
    Symbol("sglang", "launch_server", "module"),
    *(
        Symbol(f"sglang.srt.{module}", name, kind, *span)
        for rows in _TABLE.values()
        for module, kind, names, *span in rows
        for name in names.split()
    ),
)

_KINDS: dict[Kind, Callable[[object], bool]] = {
    "module": inspect.ismodule,
    "class": inspect.isclass,
    "function": callable,
    "dict": lambda value: isinstance(value, dict),
    "list": lambda value: isinstance(value, list),
    "text": lambda value: isinstance(value, str),
    "object": lambda value: value is not None,
}


def check_symbols() -> list[str]:
    """What the installed SGLang lacks, or has as something else; a line each. Imports SGLang."""
    version = host_version()
    expected = [one for one in SYMBOLS if version is None or one.is_in(version)]
    found = [(one, find(one.path)) for one in expected]
    return [
        f"{one.path}: expected a {one.kind}, found {value!r}"
        for one, value in found
        if not _KINDS[one.kind](value)
    ]


def find(path: str) -> object:
    """What the dotted path leads to, or None. Imports what is on the way."""
    try:
        return pkgutil.resolve_name(path)
    except (ImportError, AttributeError):
        return None
