"""What SGLang is told of experts, and which of its runners may have them. No GPU, no model."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("sglang")
from sglang.srt import runtime_context
from sglang.srt.layers.moe.fused_moe_triton import FusedMoE
from sglang.srt.layers.moe.token_dispatcher.base import BaseDispatcher
from sglang.srt.layers.moe.utils import MoeRunnerBackend
from sglang.srt.layers.quantization import fp8

from sglang_fp8rl.engine.modules import moe
from sglang_fp8rl.engine.modules.built import check_no_experts_turned
from sglang_fp8rl.errors import ConfigError
from sglang_fp8rl.scheme import decide_scheme

SIZES = {"blockwise": 256, "per_channel": 192}


class Dispatcher(BaseDispatcher):
    """SGLang's base class: it only keeps what it was told."""

    def __init__(self) -> None:
        super().__init__()

    def dispatch(self, hidden_states, topk_output):
        raise NotImplementedError

    def combine(self, combine_input):
        raise NotImplementedError


def choose(monkeypatch, backend: MoeRunnerBackend):
    for module in (fp8, moe):
        monkeypatch.setattr(module, "get_moe_runner_backend", lambda: backend)
    monkeypatch.setattr(fp8, "MoeRunner", lambda chosen, _: SimpleNamespace(runner_backend=chosen))


def experts(monkeypatch, scheme: str, backend: MoeRunnerBackend, *, bf16: bool = False, **runner):
    """A method and a layer as SGLang's `FusedMoE` has them before it asks for a runner.

    `bf16` keeps activations; `runner` is in the layer's configuration.
    """
    # SGLang asks for a GPU before it takes CUTLASS; the choice of a runner needs none.
    is_cutlass = backend is MoeRunnerBackend.CUTLASS
    choose(monkeypatch, MoeRunnerBackend.TRITON if is_cutlass else backend)
    monkeypatch.setattr(fp8, "cutlass_fp8_supported", lambda: False)
    config = fp8.Fp8Config(
        is_checkpoint_fp8_serialized=True,
        activation_scheme="dynamic",
        weight_block_size=[128, 128],
    )
    method = moe.Fp8BlockwiseOnlineMoEMethod(config, "model.layers.0.experts")
    layer = torch.nn.Module()
    layer.moe_runner_config = SimpleNamespace(**{"is_gated": True, "activation": "silu", **runner})
    reason = "" if scheme == "blockwise" else "192 is not a multiple of 128"
    decided = decide_scheme(reason, "per_channel", "blockwise")
    method.fp8rl_scheme = replace(decided, keeps_activations=bf16)
    method.weight_block_size = method.fp8rl_scheme.format.weight_block_size
    method.block_quant = method.weight_block_size is not None
    if not method.block_quant:
        method._create_whole(layer, 2, 256, SIZES[scheme])
    else:
        for name, rows in (("w13", 512), ("w2", 256)):
            weight = torch.zeros(2, rows, 256, dtype=torch.float8_e4m3fn)
            scale = torch.ones(2, rows // 128, 2)
            layer.register_parameter(f"{name}_weight", torch.nn.Parameter(weight, False))
            layer.register_parameter(f"{name}_weight_scale_inv", torch.nn.Parameter(scale, False))
    layer.dispatcher = Dispatcher()
    choose(monkeypatch, backend)
    return method, layer


@pytest.mark.parametrize(
    ("scheme", "name"), [("per_channel", "TRITON"), ("blockwise", "DEEP_GEMM")]
)
def test_the_dispatcher_knows_that_experts_are_fp8(monkeypatch, scheme, name):
    """Those of blocks, where their scales are packed."""
    method, layer = experts(monkeypatch, scheme, MoeRunnerBackend[name])
    monkeypatch.setattr(moe, "takes_packed_scales", lambda *_, **__: True)
    method.process_weights_after_loading(layer)
    assert (method.served is not None) is (scheme == "blockwise")
    assert layer.dispatcher.quant_config.get("weight_dtype") is torch.float8_e4m3fn


@pytest.mark.parametrize("name", ["DEEP_GEMM", "FLASHINFER_TRTLLM", "CUTLASS"])
@pytest.mark.parametrize(
    ("scheme", "bf16", "words"),
    [
        ("per_channel", False, "{}.*triton"),
        ("blockwise", True, "BF16.*{}.*one by one.*--moe-runner-backend triton"),
    ],
    ids=["one scale a row", "steps one by one"],
)
def test_a_runner_that_can_t_serve_them_is_refused_by_name(monkeypatch, name, scheme, bf16, words):
    backend = MoeRunnerBackend[name]
    method, layer = experts(monkeypatch, scheme, backend, bf16=bf16)
    with pytest.raises(ConfigError, match=rf"layers\.0\.experts.*{words.format(backend.value)}"):
        method.create_moe_runner(layer, layer.moe_runner_config)


@pytest.mark.parametrize(
    ("scheme", "name"),
    [("per_channel", "TRITON"), ("per_channel", "AUTO"), ("blockwise", "DEEP_GEMM")],
)
def test_runners_that_can_read_the_scales_are_taken(monkeypatch, scheme, name):
    method, layer = experts(monkeypatch, scheme, MoeRunnerBackend[name])
    monkeypatch.setattr(method, "is_deepgemm_moe_runner_backend_enabled", lambda *_: False)
    method.create_moe_runner(layer, layer.moe_runner_config)


@pytest.mark.parametrize("ranks", [1, 2])
def test_cutlass_with_expert_parallelism_is_refused_as_sglang_refuses_it_of_fp8(monkeypatch, ranks):
    method, layer = experts(monkeypatch, "blockwise", MoeRunnerBackend.CUTLASS)
    layer.moe_ep_size = ranks
    if ranks == 1:
        method.create_moe_runner(layer, layer.moe_runner_config)
        return
    with pytest.raises(ConfigError, match=r"layers\.0\.experts.*cutlass.*--ep-size 1"):
        method.create_moe_runner(layer, layer.moe_runner_config)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("option", ["", "enable_eplb", "elastic_ep_backend"])
def test_packed_scales_of_experts_that_move_are_refused(monkeypatch, option, packed):
    """They are no parameters, so they would stay where they are."""
    method, layer = experts(monkeypatch, "blockwise", MoeRunnerBackend.DEEP_GEMM)
    monkeypatch.setattr(moe, "takes_packed_scales", lambda *_, **__: packed)
    server = SimpleNamespace(enable_eplb=False, elastic_ep_backend=None)
    if option:
        setattr(server, option, True)
    monkeypatch.setattr(runtime_context, "get_server_args", lambda: server)
    if not (packed and option):
        method.create_moe_runner(layer, layer.moe_runner_config)
        return
    with pytest.raises(ConfigError, match=r"layers\.0\.experts.*--enable-eplb.*triton"):
        method.create_moe_runner(layer, layer.moe_runner_config)


@pytest.mark.parametrize("asked", [{"activation": "relu2"}, {"swiglu_limit": 10.0}])
def test_a_nonlinearity_that_is_not_made_is_refused_by_name(monkeypatch, asked):
    method, layer = experts(monkeypatch, "blockwise", MoeRunnerBackend.TRITON, bf16=True, **asked)
    ((name, value),) = asked.items()
    with pytest.raises(ConfigError, match=rf"experts.*{name}={value}.*bf16_activations"):
        method.create_moe_runner(layer, layer.moe_runner_config)


def test_an_adapter_of_experts_with_bf16_activations_is_refused(monkeypatch):
    """SGLang's LoRA layer asks for this, and would run its own runner with it, which quantizes."""
    method, layer = experts(monkeypatch, "per_channel", MoeRunnerBackend.TRITON, bf16=True)
    with pytest.raises(ConfigError, match=r"layers\.0\.experts.*LoRA.*adapters of experts"):
        method.get_triton_quant_info(layer)
    method.fp8rl_scheme = replace(method.fp8rl_scheme, keeps_activations=False)
    assert method.get_triton_quant_info(layer).use_fp8_w8a8


SWIGLU = "SGLANG_OPT_FUSE_SWIGLU_INTERLEAVED"


def model_of(kind: type[torch.nn.Module]) -> torch.nn.Module:
    """With one module of that class, whose constructor was never run."""
    model, inner = torch.nn.Module(), kind.__new__(kind)
    torch.nn.Module.__init__(inner)
    model.experts = inner
    return model


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("moe_a2a_backend", "megamoe"),
        ("moe_a2a_backend", "flashinfer_megamoe"),
        ("moe_runner_backend", "flashinfer_megamoe"),
        (SWIGLU, "True"),
        (SWIGLU, "y"),
    ],
)
def test_experts_that_sglang_interleaves_once_are_refused(monkeypatch, option, value):
    server = SimpleNamespace(moe_a2a_backend="none", moe_runner_backend="deep_gemm")
    monkeypatch.setattr(runtime_context, "get_server_args", lambda: server)
    monkeypatch.setenv(SWIGLU, "0")
    check_no_experts_turned(model_of(FusedMoE))
    if option == SWIGLU:
        monkeypatch.setenv(SWIGLU, value)
        match = SWIGLU
    else:
        setattr(server, option, value)
        match = f"--{option.replace('_', '-')} {value}"
    with pytest.raises(ConfigError, match=f"experts: {match}; .*interleaved once.*Leave it out"):
        check_no_experts_turned(model_of(FusedMoE))
    check_no_experts_turned(model_of(torch.nn.Linear))
