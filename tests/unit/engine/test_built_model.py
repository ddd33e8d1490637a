"""A model that SGLang has built: which tensor is an FP8 weight, and what its vision tower is said to be."""

from types import SimpleNamespace

import pytest
import torch
from sglang.srt.layers.attention.vision import VisionAttention
from sglang.srt.layers.linear import LinearBase
from support.replayed import replay_of

from sglang_fp8rl.config import Options
from sglang_fp8rl.engine.arrival.update import Origin, Update
from sglang_fp8rl.engine.host.hooks import build_model
from sglang_fp8rl.engine.model.parameters import targets_of
from sglang_fp8rl.engine.modules.built import (
    _check_names,
    _leave_fusions,
    _leave_vision_towers,
    _leave_what_its_model_writes,
    _named_schemes,
    _written_in_place,
)
from sglang_fp8rl.engine.modules.config import Fp8BlockwiseOnlineConfig
from sglang_fp8rl.engine.modules.method import DecidedMethod, scheme_of
from sglang_fp8rl.errors import ConfigError, RefitError
from sglang_fp8rl.formats import FORMATS
from sglang_fp8rl.scheme import Cause, Scheme
from tools.census.toys.toy import attached

BLOCKWISE = Scheme(FORMATS["blockwise"], Cause.ALIGNED, "")


class Method(DecidedMethod):
    def __init__(self, scheme):
        self.fp8rl_scheme = scheme


@pytest.mark.parametrize("is_held_first_by_another", [False, True])
def test_an_fp8_weight_is_one_whichever_module_holds_it_too(is_held_first_by_another):
    layer, parent = torch.nn.Module(), torch.nn.Module()
    layer.quant_method = Method(BLOCKWISE)
    layer.weight = torch.nn.Parameter(
        torch.zeros(128, 128).to(torch.float8_e4m3fn), requires_grad=False
    )
    layer.weight_scale_inv = torch.nn.Parameter(torch.ones(1, 1))
    if is_held_first_by_another:
        parent.alias = layer.weight
    parent.proj = layer
    target = targets_of(parent)[id(layer.weight)]
    assert target.is_fp8
    assert target.scale is layer.weight_scale_inv
    assert target.format is BLOCKWISE.format
    assert target.module is layer


def bare(kind):
    """A module of that class without what its constructor asks for."""
    module = kind.__new__(kind)
    torch.nn.Module.__init__(module)
    return module


@pytest.mark.parametrize(
    ("scheme", "cause"),
    [
        (BLOCKWISE, Cause.VISION_TOWER),
        (Scheme(FORMATS["per_channel"], Cause.ASKED, "granularity"), Cause.VISION_TOWER),
        (Scheme(None, Cause.MISALIGNED, "576"), Cause.VISION_TOWER),
        (Scheme(None, Cause.ASKED, "ignored_layers"), Cause.ASKED),
    ],
)
def test_a_tower_is_said_to_be_one_whatever_was_decided_before(scheme, cause):
    layer = bare(LinearBase)
    layer.quant_method = Method(scheme)
    tower = torch.nn.ModuleList([bare(VisionAttention), layer])
    _leave_vision_towers(tower)
    assert scheme_of(layer).cause is cause
    assert not scheme_of(layer).is_fp8


def sparse_attention_in_bf16():
    """MiniMax-M3's, as on a GPU: two projections in BF16, which its model joins behind every load."""
    minimax = pytest.importorskip("sglang.srt.models.minimax_m3")
    from sglang.srt.layers.quantization.unquant import UnquantizedLinearMethod

    attention = bare(minimax.MiniMaxM3Attention)
    attention._fuse_qkv_index_enabled, attention._fused_qkv_index = True, None
    for name in ("qkv_proj", "index_qkv_proj"):
        layer = bare(LinearBase)
        layer.weight = torch.nn.Parameter(torch.zeros(4, 8).bfloat16(), requires_grad=False)
        layer.quant_method, layer.params_dtype = UnquantizedLinearMethod(), torch.bfloat16
        layer.input_size, layer.output_size_per_partition = 8, 4
        setattr(attention, name, layer)
    model = torch.nn.Sequential(attention)

    def load_weights(pairs):
        for name, tensor in pairs:
            model.get_parameter(name).data.copy_(tensor)
        minimax.build_minimax_fused_qkv_index(model)

    model.load_weights = load_weights
    return model


def test_projections_that_sglang_would_join_stay_as_updates_write_them():
    model = sparse_attention_in_bf16()
    _leave_fusions(model)
    refit = attached(model)
    for value, origin in enumerate((Origin.STARTUP, Origin.TENSOR, Origin.TENSOR)):
        sent = torch.full((4, 8), float(value))
        with refit.during(Update(origin)):
            model.load_weights([(name, sent) for name, _ in model.named_parameters()])
        for name in ("qkv_proj", "index_qkv_proj"):
            assert torch.equal(getattr(model[0], name).weight, sent.bfloat16())
    assert replay_of(refit).counts.calls == 1


def test_a_linear_layer_whose_weight_its_model_writes_while_it_runs_is_told_by_its_class():
    from sglang.srt.models.gemma3n_causal import Gemma3nAltUp

    assert set(_written_in_place(Gemma3nAltUp)) == {"correction_coefs", "prediction_coefs"}


def test_what_sglang_copies_while_it_loads_is_not_written_by_its_model():
    """DeepSeek-V4 turns rows of `wq_b` once, behind its load; and most classes have nothing of the kind."""
    from sglang.srt.models import deepseek_v2, deepseek_v4, qwen3

    kinds = [
        kind
        for module in (deepseek_v2, deepseek_v4, qwen3)
        for kind in vars(module).values()
        if isinstance(kind, type) and issubclass(kind, torch.nn.Module)
    ]
    assert len(kinds) > 20
    assert not [kind for kind in kinds if _written_in_place(kind)]


@pytest.mark.parametrize("decided", [BLOCKWISE, Scheme(None, Cause.MISALIGNED, "576")])
def test_what_a_model_writes_stays_in_high_precision_with_its_reason(decided):
    class Clamping(torch.nn.Module):
        def forward(self, x):
            self.layer.weight.data.clamp_(-1, 1)
            return self.other(self.layer(x))

    model = Clamping()
    for name, scheme in (("layer", decided), ("other", BLOCKWISE)):
        layer = bare(LinearBase)
        layer.quant_method = Method(scheme)
        setattr(model, name, layer)
    _leave_what_its_model_writes(torch.nn.ModuleList([model]))
    found = scheme_of(model.layer)
    assert found.cause is Cause.WRITTEN
    assert "in place" in found.reason
    assert not found.is_fp8
    assert scheme_of(model.other) is BLOCKWISE


def test_no_module_is_lost_where_one_s_prefix_is_the_path_of_another():
    layers = torch.nn.ModuleDict({name: torch.nn.Linear(1, 1) for name in "abc"})
    for layer, prefix in zip(layers.values(), ("", "a", "own"), strict=True):
        layer.fp8rl_prefix = prefix
        layer.quant_method = Method(Scheme(None, Cause.ASKED, prefix))
    schemes = {name: one.reason for name, one in _named_schemes(layers).items()}
    assert schemes == {"a": "", "b": "a", "own": "own"}


@pytest.mark.parametrize(
    ("option", "named"),
    [
        ("ignored_layers", "ignored_layers"),
        ("modules_to_not_convert", "ignored_layers"),
        ("bf16_activations", "bf16_activations"),
    ],
)
@pytest.mark.parametrize("pattern", ["model.layers.0", "re:.*proj", "layers.0.attn.o_proj"])
def test_a_pattern_of_a_name_that_sglang_does_not_use_is_refused(option, named, pattern):
    """FalconH1: SGLang gives its MLP a prefix, and its attention none."""
    config = Fp8BlockwiseOnlineConfig(Options.from_dict({option: [pattern]}))
    model, layer = torch.nn.Module(), torch.nn.Module()
    model.model = torch.nn.Module()
    model.model.layers = torch.nn.ModuleList([layer])
    layer.attn, layer.mlp = torch.nn.Module(), torch.nn.Module()
    for parent, leaf, prefix in (
        (layer.attn, "o_proj", ""),
        (layer.attn, "dense", ""),
        (layer.mlp, "down_proj", "model.layers.0.mlp.down_proj"),
    ):
        linear = bare(LinearBase)
        linear.quant_method = config.get_quant_method(linear, prefix)
        if isinstance(linear.quant_method, DecidedMethod):
            linear.quant_method.decide("")
        setattr(parent, leaf, linear)
    config.schemes.update(_named_schemes(model))
    said = f"{named}: SGLang calls model.layers.0.attn.o_proj ''; .*misses"
    with pytest.raises(ConfigError, match=said):
        _check_names(model, config)


def test_no_model_is_built_for_a_loader_that_comes_before_its_own():
    asked = SimpleNamespace(load_format="flash_rl")
    with pytest.raises(RefitError, match="load_format: 'flash_rl'"):
        build_model(None, None, asked, Fp8BlockwiseOnlineConfig())
