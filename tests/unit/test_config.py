"""Options: validated, and unknown keys refused."""

import pytest

from sglang_fp8rl.config import ModulePatterns, Options
from sglang_fp8rl.errors import ConfigError

FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}


def parts_of(leaf):
    return FUSED.get(leaf, ())


@pytest.fixture(autouse=True)
def _no_environment(monkeypatch):
    monkeypatch.delenv("SGLANG_FP8_IGNORED_LAYERS", raising=False)


def test_defaults():
    options = Options.from_dict({"quant_method": "fp8_blockwise_online"})
    assert options == Options()
    assert options.granularity == "blockwise"
    assert options.misaligned == "per_channel"
    assert options.unknown_names == "error"
    assert options.round_to_bf16


def test_keys_of_the_host_are_not_ours_to_refuse():
    Options.from_dict({"packed_modules_mapping": {}, "hf_config": object()})


def test_an_unknown_key_is_refused_with_the_known_ones_and_a_guess():
    with pytest.raises(ConfigError, match=r"'misalign'.*weight_block_size.*'misaligned'"):
        Options.from_dict({"misalign": "bf16"})


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("weight_block_size", [64, 64]),
        ("weight_block_size", 128),
        ("granularity", "per_tensor"),
        ("misaligned", "fp16"),
        ("ignored_layers", "lm_head"),
        ("ignored_layers", ["re:("]),
        ("ignored_layers", [""]),
        ("unknown_names", "ignore"),
        ("num_first_layers_in_bf16", -1),
        ("num_last_layers_in_bf16", True),
        ("activations", "bfloat16"),
        ("bf16_activations", ["re:("]),
        ("exact_product_tokens", -1),
        ("exact_product_tokens", 16.5),
        ("use_weight_pow2_scale", 1),
        ("round_to_bf16", "no"),
        ("granularity", None),
        ("weight_block_size", None),
        ("kv_scales", None),
        ("kv_calibration_tokens", [1] * 513),
    ],
)
def test_a_value_out_of_range_is_named(key, value):
    with pytest.raises(ConfigError, match=key):
        Options.from_dict({key: value})


@pytest.mark.parametrize("options", [{"ignored_layers": ["\ud800"]}, {"granularity": "\ud800"}])
def test_half_a_character_in_a_text_is_refused_in_words_that_can_be_written(options):
    with pytest.raises(ConfigError, match=r"^quantization_config: .*ud800.*Unicode") as refused:
        Options.from_dict(options)
    str(refused.value).encode()


def test_null_is_an_empty_list_and_hides_no_unknown_key():
    assert Options.from_dict({"ignored_layers": None, "modules_to_not_convert": None}) == Options()
    with pytest.raises(ConfigError, match="'granularty'"):
        Options.from_dict({"granularty": None})


def test_the_environment_adds_ignored_layers(monkeypatch):
    monkeypatch.setenv("SGLANG_FP8_IGNORED_LAYERS", "model.layers.0, model.layers.3.mlp")
    options = Options.from_dict({"ignored_layers": ["model.layers.7"]})
    assert options.ignored_layers == ("model.layers.7", "model.layers.0", "model.layers.3.mlp")


@pytest.mark.parametrize(
    "option", [{"bf16_activations": ["model"]}, {"use_activation_pow2_scale": True}]
)
def test_an_option_about_quantized_activations_is_refused_where_there_are_none(option):
    (name,) = option
    Options.from_dict(option)
    with pytest.raises(ConfigError, match=f"{name}: .*activations='bf16'"):
        Options.from_dict({**option, "activations": "bf16"})


def test_tokens_to_calibrate_with_are_refused_where_nothing_is_calibrated():
    tokens = {"kv_calibration_tokens": [1, 2]}
    Options.from_dict({**tokens, "kv_scales": "calibrated"})
    with pytest.raises(ConfigError, match=r"kv_calibration_tokens: .*kv_scales='certified'"):
        Options.from_dict(tokens)


def test_patterns_name_their_option_where_they_cut_a_fused_module():
    patterns = ModulePatterns("bf16_activations", ("re:.*k_proj",), parts_of)
    with pytest.raises(ConfigError, match=r"bf16_activations covers \['k_proj'\].*Name all of"):
        patterns.match("model.layers.0.self_attn.qkv_proj")


def ignored(*patterns):
    return ModulePatterns("ignored_layers", patterns, parts_of)


def test_a_prefix_covers_what_is_below_it_and_not_its_namesakes():
    layers = ignored("model.layers.1")
    assert layers.match("model.layers.1.mlp.down_proj")
    assert not layers.match("model.layers.10.mlp.down_proj")
    assert not layers.match("model.layers.2.mlp.down_proj")


def test_a_prefix_without_model_is_the_same_prefix():
    assert ignored("layers.1.mlp").match("model.layers.1.mlp.down_proj")


@pytest.mark.parametrize("pattern", ["model", "model.model.layers.3", "layers.3.mlp.up"])
def test_a_prefix_that_is_no_modules_covers_none(pattern):
    assert not ModulePatterns("ignored_layers", (pattern,), parts_of).match(
        "model.layers.3.mlp.up_proj"
    )


def test_a_regular_expression_has_to_match_the_whole_prefix():
    assert ignored(r"re:.*\.down_proj").match("model.layers.1.mlp.down_proj")
    assert not ignored(r"re:down_proj").match("model.layers.1.mlp.down_proj")


def test_all_parts_of_a_fused_module_cover_it():
    prefix = "model.layers.0.self_attn"
    parts = [f"{prefix}.{part}" for part in FUSED["qkv_proj"]]
    assert set(ignored(*parts).match(f"{prefix}.qkv_proj")) == set(parts)


def test_some_parts_of_a_fused_module_are_an_error():
    with pytest.raises(ConfigError, match=r"covers \['q_proj'\]"):
        ignored("model.layers.0.self_attn.q_proj").match("model.layers.0.self_attn.qkv_proj")


@pytest.mark.parametrize(
    "patterns",
    [
        ("model.layers.0", "layers.0"),
        ("model.layers.0", "model.layers.0.self_attn", "re:.*qkv_proj"),
        ("model.layers.0.self_attn.qkv_proj", "model.layers.0.self_attn.q_proj"),
        tuple(f"{start}layers.0.self_attn.{p}_proj" for start in ("model.", "") for p in "qkv"),
    ],
)
def test_a_pattern_names_a_module_also_where_another_covers_it(patterns):
    layers = ignored(*patterns)
    assert layers.match("model.layers.0.self_attn.qkv_proj")
    assert layers.used == set(patterns)


def test_first_and_last_layers_are_counted_from_either_end():
    options = Options(num_first_layers_in_bf16=1, num_last_layers_in_bf16=2)
    kept = [n for n in range(6) if options.layer_reason(f"model.layers.{n}.mlp.up_proj", 6)]
    assert kept == [0, 4, 5]
    assert not options.layer_reason("model.layers.7.mlp.up_proj", 6)  # an embedded draft's layer
    assert not options.layer_reason("model.norm", 6)


def test_last_layers_of_a_model_of_unknown_depth_are_an_error():
    with pytest.raises(ConfigError, match="num_last_layers_in_bf16"):
        Options(num_last_layers_in_bf16=1).layer_reason("model.layers.0.mlp.up_proj", None)
