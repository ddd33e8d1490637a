"""Everything of SGLang that is hooked on the CPU platform: what, why, and when it can go.

Clients that send CPU tensors to a server of this platform need the same two things as the server:
`torch.multiprocessing.set_sharing_strategy("file_system")`, and, if they use SGLang's own client
helpers, `sglang.srt.plugins.load_plugins()` with `SGLANG_PLATFORM=fp8rl_cpu` set.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable
from typing import Any

import psutil
import torch

from ...declared_hooks import Hook, register_hooks
from .cpu_linear import apply_fp8_linear, block_fp8_linear
from .cpu_moe import fused_experts, grouped_product, moe_forward_native, sorted_by_expert


def _dispatch_w8a8_block_fp8_linear(
    weight_block_size: list[int] | None = None, act_scale_ue8m0: bool = False
) -> Callable[..., torch.Tensor]:
    return functools.partial(block_fp8_linear, act_scale_ue8m0=act_scale_ue8m0)


def _blocks_as_bf16(
    codes: torch.Tensor, scales: torch.Tensor, block_size: list[int]
) -> tuple[torch.Tensor, float]:
    """`kv_b_proj` as a GPU derives from it: dequantized to BF16, and no scale.

    Args:
        codes: `[N, K]` e4m3. scales: `[ceil(N / block_n), ceil(K / block_k)]` FP32.
    """
    from sglang.srt.layers.quantization.fp8_utils import block_quant_dequant

    return block_quant_dequant(codes, scales, block_size, torch.bfloat16), 1.0


def _nothing() -> None: ...


def _without_pynccl(*args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Arguments of `init_model_parallel_group`; `use_pynccl` is the fourth."""
    if len(args) > 3:
        return None
    return args, {**kwargs, "use_pynccl": bool(kwargs.get("use_pynccl"))}


def _unpadded_config(model_config: Any, load_config: Any, tp_size: int) -> Any:
    return model_config


def _synchronized_with_the_cpu(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """In here, torch's device module is the CPU's: a CUDA build names CUDA, with or without a GPU."""
    before: Any = torch.get_device_module
    host: Any = torch
    host.get_device_module = lambda device=None: torch.cpu if device is None else before(device)
    try:
        return original(*args, **kwargs)
    finally:
        host.get_device_module = before


def _without_torchs_manager(
    original: Callable[..., Any],
    parent_pid: int | None,
    include_parent: bool = True,
    skip_pid: int | None = None,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Torch's manager of shared memory outlives an engine: it ends by itself, with this process."""
    if parent_pid in (None, os.getpid()) and not include_parent and skip_pid is None:
        for child in psutil.Process().children():
            with contextlib.suppress(psutil.NoSuchProcess):  # it ended meanwhile
                skip_pid = child.pid if child.name().startswith("torch_shm") else skip_pid
    return original(parent_pid, include_parent, skip_pid, *args, **kwargs)


CPU_HOOKS: tuple[Hook, ...] = (
    Hook(
        "sglang.srt.layers.quantization.fp8_utils.dispatch_w8a8_block_fp8_linear",
        "REPLACE",
        _dispatch_w8a8_block_fp8_linear,
        reason="its fallback for a device without DeepGEMM is a Triton kernel",
        until="SGLang asks the platform for its FP8 linear, or has a torch one",
    ),
    Hook(
        "sglang.srt.layers.quantization.fp8_utils.apply_fp8_linear",
        "REPLACE",
        apply_fp8_linear,
        reason="quantizes activations with a Triton or CUDA kernel",
        until="as above",
    ),
    Hook(
        "sglang.srt.layers.moe.moe_runner.triton_utils.fused_moe.fused_experts",
        "REPLACE",
        fused_experts,
        reason="Fp8MoEMethod runs its experts with the Triton runner, whatever the device",
        until="an out-of-tree platform can name its MoE runner on every supported version",
    ),
    Hook(
        "sglang.srt.layers.moe.moe_runner.triton.pre_permute_standard_to_triton",
        "REPLACE",
        sorted_by_expert,
        reason="sorts by expert with a CUDA kernel",
        until="as above",
    ),
    Hook(
        "sglang.kernels.ops.moe.fused_moe_triton_kernels.invoke_fused_moe_kernel",
        "REPLACE",
        grouped_product,
        reason="is a Triton kernel; experts with activations in BF16 call it twice",
        until="as above",
    ),
    Hook(
        "sglang.srt.layers.moe.fused_moe_native.moe_forward_native",
        "REPLACE",
        moe_forward_native,
        reason="SGLang's torch experts fail on id −1, so there is no expert parallelism with them",
        until="SGLang's version skips ids of other ranks",
    ),
    Hook(
        "sglang.srt.layers.quantization.fp8_utils.block_quant_to_tensor_quant",
        "REPLACE",
        _blocks_as_bf16,
        reason="MLA's w_kc and w_vc are BF16 on a GPU; elsewhere SGLang quantizes them again, per tensor, "
        "for a kernel that no CPU has",
        until="SGLang derives alike on every device",
    ),
    Hook(
        "sglang.srt.utils.patch_torch.monkey_patch_torch_reductions",
        "REPLACE",
        _nothing,
        reason="rewrites the device index of a CUDA handle; a CPU tensor's handle has no such field",
        until="SGLang leaves handles of CPU tensors alone",
    ),
    Hook(
        "sglang.srt.distributed.parallel_state.init_model_parallel_group",
        "BEFORE",
        _without_pynccl,
        reason="opens NCCL on the CPU device where the NCCL library is installed",
        until="0.5.21 and earlier are dropped: 0.5.22 asks the platform (`supports_pynccl`)",
    ),
    Hook(
        "sglang.srt.configs.update_config.adjust_config_with_unaligned_cpu_tp",
        "REPLACE",
        _unpadded_config,
        reason="on a CPU it pads heads and intermediate sizes to whole blocks; a GPU serves the model "
        "as it is, and replicates KV heads",
        until="the padding is asked for by the CPU kernels that want it",
    ),
    Hook(
        "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"
        ".release_memory_occupation",
        "AROUND",
        _synchronized_with_the_cpu,
        reason="ends with torch's default device module, CUDA's with or without a GPU, and the "
        "scheduler with it",
        until="SGLang synchronizes the device that it serves on",
    ),
    Hook(
        "sglang.srt.utils.common.kill_process_tree",
        "AROUND",
        _without_torchs_manager,
        reason="`Engine.shutdown` kills torch's manager of shared memory too, and a process whose tensors "
        "are shared is aborted when it frees them: Broken pipe",
        until="SGLang ends the processes that it started and no others",
    ),
)


def register_cpu_hooks() -> None:
    """Register the hooks of this file; `load_plugins()` applies them right after.

    *Side effects*: this process shares CPU tensors by file name from now on. torch's default (file descriptors)
    is refused between processes that did not start each other (`AuthenticationError: digest sent was rejected`),
    which kills the scheduler.
    """
    torch.multiprocessing.set_sharing_strategy("file_system")
    register_hooks(CPU_HOOKS)
