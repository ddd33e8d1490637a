"""SGLang on the CPU, for checking: the real engine with torch-native operations, exact and repeatable, not fast.

What SGLang itself has to be told otherwise on a CPU is in `cpu_hooks.py`; the FP8 arithmetic is in
`cpu_linear.py` and `cpu_moe.py`.
"""

from __future__ import annotations

import gc
import importlib
import os
from typing import Any

import psutil
import torch
from sglang.srt.platforms.device_mixin import DeviceCapability, PlatformEnum
from sglang.srt.platforms.interface import SRTPlatform

from ...errors import HostError
from ...versions import PLATFORMS_NAME_POOLS
from . import ATTENTION_VARIABLE

# A reference server shares its host's memory with the trainer and the tests. SGLang's own default
# (a fraction of all memory) would take it all, so the KV cache gets a fixed size instead.
MAX_TOTAL_TOKENS, MAX_RUNNING_REQUESTS = 32768, 32


class Fp8RlCpuPlatform(SRTPlatform):
    """A CPU as an out-of-tree SGLang device.

    `capabilities` (0.5.22 and later) is left at SGLang's conservative default: no Triton, no
    graphs. The `get_*_cls` methods answer the older hosts, which have no in-tree default.
    """

    _enum = PlatformEnum.OOT
    device_name = "cpu"
    device_type = "cpu"

    def apply_server_args_defaults(self, server_args: Any) -> None:
        """Choose what runs on a CPU; a user needs no flag beyond the model path.

        `intel_amx` attention, which SGLang has by now chosen for the device `cpu`, is not kept, even if it was
        the user's choice: its kernels are not in the released wheel.
        """
        if getattr(server_args, "enable_memory_saver", False):
            raise HostError(
                "--enable-memory-saver",
                "on the CPU platform",
                "it pages CUDA memory in and out",
                "Leave it out here; on a GPU it works.",
            )
        if server_args.attention_backend in (None, "intel_amx"):
            server_args.attention_backend = self.get_default_attention_backend()
        server_args.sampling_backend = "pytorch"
        server_args.disable_overlap_schedule = True  # there is no second stream to overlap with
        server_args.disable_custom_all_reduce = True
        if server_args.max_total_tokens is None:
            server_args.max_total_tokens = MAX_TOTAL_TOKENS
        if server_args.max_running_requests is None:
            server_args.max_running_requests = MAX_RUNNING_REQUESTS

    def get_default_attention_backend(self) -> str:
        return "torch_native"

    def init_backend(self) -> None:
        """Called in each worker: share CPU tensors by file name, read them whole, and serve MLA."""
        from sglang.srt.layers.attention.attention_registry import register_attention_backend
        from sglang.srt.models.deepseek_common.attention_backend_handler import (
            AttentionBackendRegistry,
        )

        from .shared_memory import check_shared_memory

        register_attention_backend("torch_native")(_make_attention)
        AttentionBackendRegistry.register("torch_native", _absorbed_mla)
        torch.multiprocessing.set_sharing_strategy("file_system")
        check_shared_memory()

    def get_device(self, device_id: int = 0) -> str:
        return "cpu"  # every rank shares the one CPU device

    def set_device(self, device: torch.device) -> None:
        """Nothing to set."""

    def get_device_uuid(self, device_id: int = 0) -> str:
        return f"cpu-{device_id}"

    def get_device_capability(self, device_id: int = 0) -> DeviceCapability | None:
        return None

    def get_device_total_memory(self, device_id: int = 0) -> int:
        return int(psutil.virtual_memory().total)

    def get_current_memory_usage(self, device: torch.device | None = None) -> float:
        memory = psutil.virtual_memory()
        return float(memory.total - memory.available)

    def empty_cache(self) -> None:
        gc.collect()

    def get_torch_profiler_activity_str(self) -> str:
        return "CPU"

    def get_torch_profiler_activity(self) -> torch.profiler.ProfilerActivity:
        return torch.profiler.ProfilerActivity.CPU

    # --- memory pools: 0.5.22 and later have a default for any device, older hosts ask ---

    def get_kv_pool_cls(self, *, kind: str) -> None:
        """No opinion: the in-tree pool."""

    def get_mha_kv_pool_cls(self) -> type:
        from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

        return MHATokenToKVPool

    def get_mla_kv_pool_cls(self) -> type:
        from .cpu_allocator import LatentPool

        return LatentPool

    def get_paged_allocator_cls(self) -> type | None:
        if PLATFORMS_NAME_POOLS:
            return None
        from .cpu_allocator import TokenAllocator

        return TokenAllocator


def _make_attention(runner: Any) -> Any:
    """SGLang's torch attention, or that of the module that is asked for when a worker makes its own."""
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend

    if other := os.environ.get(ATTENTION_VARIABLE):
        return importlib.import_module(other).make_backend(runner)
    return TorchNativeAttnBackend(runner)


def _absorbed_mla(attention: Any, forward_batch: Any) -> Any:
    """The forward method of MLA. SGLang's handler for other backends reads keys that the latent cache
    does not hold; absorbed attention needs nothing but `w_kc`, `w_vc` and plain attention."""
    from sglang.srt.models.deepseek_common.attention_forward_methods.forward_methods import (
        AttnForwardMethod,
    )

    return AttnForwardMethod.MLA
