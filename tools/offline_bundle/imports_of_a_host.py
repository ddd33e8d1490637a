"""Imports what a server and a client import, on a machine that is told it has a Hopper GPU.

Run by the bundle's own interpreter (`host_check.py`); prints each module with its error, or "", as JSON in its last line.
"""

import importlib
import json
import traceback
import types

import torch

MODULES = """
    scipy.stats sklearn.metrics accelerate transformers
    sgl_kernel sgl_kernel.elementwise sgl_kernel.sampling sgl_kernel.gemm sgl_kernel.moe deep_gemm
    sglang.launch_server sglang.srt.entrypoints.http_server sglang.srt.entrypoints.engine
    sglang.srt.managers.scheduler sglang.srt.managers.tokenizer_manager sglang.srt.managers.detokenizer_manager
    sglang.srt.model_executor.model_runner
    sglang.srt.layers.attention.triton_backend sglang.srt.layers.layernorm sglang.srt.layers.activation
    sglang.srt.layers.rotary_embedding sglang.srt.layers.quantization.fp8
    sglang.srt.layers.quantization.fp8_utils sglang.srt.layers.moe.fused_moe_triton.layer
    sglang.srt.layers.moe.topk sglang.srt.layers.sampler sglang.srt.layers.deep_gemm_wrapper
    sglang.srt.models.llama sglang.srt.models.qwen2 sglang.srt.models.qwen3 sglang.srt.models.qwen2_moe
    sglang.srt.models.qwen3_moe sglang.srt.models.mixtral sglang.srt.models.deepseek_v2 sglang.srt.models.glm4_moe
    sglang.srt.weight_sync.utils sglang.srt.utils.patch_torch torch_memory_saver
    sglang.benchmark.one_batch_server
    sglang_fp8rl.plugin sglang_fp8rl.engine.host.updater sglang_fp8rl.engine.modules.linear
    sglang_fp8rl.engine.modules.moe sglang_fp8rl.numerics.triton.table sglang_fp8rl.lab.cli
    sglang_fp8rl.client sglang_fp8rl.trainer verl.utils.kernel.fp8_kernel
    torchao.prototype.blockwise_fp8_training.kernels
"""


def tell_of_a_hopper() -> None:
    """Torch says that there is an H100; nothing may be launched on it."""
    told = types.SimpleNamespace(
        name="NVIDIA H100", major=9, minor=0, multi_processor_count=132, total_memory=80 << 30
    )
    torch.cuda.is_available = lambda: True
    torch.cuda.device_count = lambda: 1
    torch.cuda.current_device = lambda: 0
    torch.cuda.get_device_name = lambda *_: told.name
    torch.cuda.get_device_capability = lambda *_: (told.major, told.minor)
    torch.cuda.get_device_properties = lambda *_: told


def error_of(name: str) -> str:
    """Why a module can't be imported, whatever it raises; empty if it can."""
    try:
        importlib.import_module(name)
    except (Exception, SystemExit):  # noqa: BLE001
        return traceback.format_exc(limit=-3)
    return ""


if __name__ == "__main__":
    tell_of_a_hopper()
    found = {name: error_of(name) for name in MODULES.split()}
    kernels = importlib.import_module("sgl_kernel.elementwise")
    found["norms of sgl_kernel's own"] = (
        "they ask for FlashInfer, whose sources are not here" if kernels._has_flashinfer else ""
    )
    print(json.dumps(found))
