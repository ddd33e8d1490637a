"""What can't be read off a config class: for a few models, the config that they take or a size in it."""

from __future__ import annotations

import re
from typing import Any

# Architecture to the `model_type` of a config that it takes, or to a class of `transformers`.
BASES: dict[str, str] = {
    "Qwen3_5ForCausalLM": "qwen3_5_text",
    "Qwen3_5MoeForCausalLM": "qwen3_5_moe_text",
    "TransformersEmbeddingModel": "llama",
    "TransformersForCausalLM": "llama",
    "TransformersForSequenceClassification": "llama",
    "TransformersMoEEmbeddingModel": "qwen3_moe",
    "TransformersMoEForCausalLM": "qwen3_moe",
    "TransformersMultiModalEmbeddingModel": "qwen2_5_vl",
    "TransformersMultiModalForCausalLM": "qwen2_5_vl",
    "TransformersMultiModalForSequenceClassification": "qwen2_5_vl",
    "TransformersMultiModalMoEEmbeddingModel": "qwen3_vl_moe",
    "TransformersMultiModalMoEForCausalLM": "qwen3_vl_moe",
    "TransformersMultiModalMoEForSequenceClassification": "qwen3_vl_moe",
    "TransformersMoEForSequenceClassification": "qwen3_moe",
}

# Of a model whose config class is on the hub: dense, grouped heads.
UNKNOWN: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}

_FULL, _SLIDING = "full_attention", "sliding_attention"
_KIMI_LINEAR: dict[str, Any] = {
    "architectures": ["KimiLinearForCausalLM"],
    "num_hidden_layers": 8,
    "first_k_dense_replace": 1,
    "num_experts": 256,
    "num_experts_per_token": 8,
    "num_shared_experts": 1,
    "moe_intermediate_size": 1024,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "mla_use_nope": True,
    "linear_attn_config": {
        "kda_layers": [1, 2, 3, 5, 6, 7],
        "full_attn_layers": [4, 8],
        "num_heads": 32,
        "head_dim": 128,
        "short_conv_kernel_size": 4,
    },
}
_QWEN3_5_ROPE = {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25}
_QWEN3_5: dict[str, Any] = {
    "full_attention_interval": 4,
    "rope_parameters": _QWEN3_5_ROPE | {"mrope_section": [11, 11, 10], "mrope_interleaved": True},
}
_QWEN3_5_VL = {"text_config": _QWEN3_5}
_DEEPSEEK = {"architectures": ["DeepseekV3ForCausalLM"]}

_DEEPSEEK_V4: dict[str, Any] = {
    "num_hidden_layers": 12,
    "num_key_value_heads": 1,
    "compress_ratios": [0, 0, 4, 128] * 3,
    "compress_rope_theta": 160000.0,
    "head_dim": 512,
    "q_lora_rank": 1024,
    "o_lora_rank": 1024,
    "o_groups": 8,
    "hc_mult": 4,
    "hc_sinkhorn_iters": 20,
    "hc_eps": 1e-6,
    "index_n_heads": 64,
    "index_head_dim": 128,
    "index_topk": 512,
    "num_hash_layers": 3,
    "sliding_window": 128,
    "rope_scaling": {
        "type": "yarn",
        "factor": 16,
        "original_max_position_embeddings": 65536,
        "beta_fast": 32,
        "beta_slow": 1,
    },
    "swiglu_limit": 10.0,
    "scoring_func": "sqrtsoftplus",
    "first_k_dense_replace": 0,
    "q_head_norm": True,
}
_GLM5_NEXT = {"index_topk": 64, "index_n_heads": 32, "index_head_dim": 128, "swiglu_limit": 7.0}
_MIMO_V2: dict[str, Any] = {
    "num_hidden_layers": 12,
    "hybrid_layer_pattern": [0, 1, 1, 1, 1, 0] * 2,
    "layer_types": [_FULL, *[_SLIDING] * 4, _FULL] * 2,
    "moe_layer_freq": [0, *[1] * 11],
    "mlp_layer_types": ["dense", *["sparse"] * 11],
    "swa_num_attention_heads": 64,
    "swa_num_key_value_heads": 8,
    "swa_head_dim": 192,
    "swa_v_head_dim": 128,
    "sliding_window_size": 128,
    "swa_rope_theta": 10000.0,
    "rope_theta": 5000000.0,
    "add_swa_attention_sink_bias": True,
    "add_full_attention_sink_bias": False,
    "layernorm_epsilon": 1e-5,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "attention_value_scale": 0.707,
}
_MINIMAX_M3: dict[str, Any] = {
    "num_hidden_layers": 12,
    "num_local_experts": 128,
    "num_experts_per_tok": 4,
    "n_shared_experts": 1,
    "dense_intermediate_size": 1024,
    "moe_layer_freq": [0, 0, 0, *[1] * 9],
    "qk_norm_type": "per_head",
    "use_qk_norm": True,
    "use_gemma_norm": True,
    "swiglu_alpha": 1.702,
    "swiglu_limit": 7.0,
    "hidden_act": "swigluoai",
    "scoring_func": "sigmoid",
    "use_routing_bias": True,
    "rotary_dim": 64,
    "head_dim": 128,
    "sparse_attention_config": {
        "sparse_attention_freq": [0, 0, 0, *[1] * 9],
        "sparse_disable_index_value": [0, 0, 0, *[1] * 9],
        "sparse_num_index_heads": 4,
        "sparse_index_dim": 128,
        "sparse_block_size": 128,
        "sparse_topk_blocks": 16,
        "sparse_init_block": 1,
        "sparse_local_block": 1,
    },
}
_MINIMAX_M3_VISION: dict[str, Any] = {
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "num_channels": 3,
    "image_size": 336,
    "patch_size": 14,
    "hidden_act": "gelu",
    "layer_norm_eps": 1e-5,
    "img_token_compression_config": {"spatial_merge_size": 2, "temporal_patch_size": 2},
    "position_embedding_type": "rope",
    "rope_mode": "3d",
    "rope_theta": 10000.0,
    "vision_segment_max_frames": 4,
}

# Architectures (a regular expression) to what files on the hub say and the defaults of the config class do not:
# its arguments, of the real size.
ARGUMENTS: dict[str, dict[str, Any]] = {
    "AfmoeForCausalLM": {"num_experts": 4, "num_dense_layers": 2},
    "Gemma4ForConditionalGeneration": {"vision_config": {}},
    "Qwen3NextForCausalLM(MTP)?": {"full_attention_interval": 4},
    "Qwen3_5(Moe)?ForCausalLM": _QWEN3_5,
    "Qwen3_5(Moe)?ForConditionalGeneration|Qwen3_5ForCausalLMMTP": _QWEN3_5_VL,
    "InternS2(Preview|Mobius)ForConditionalGeneration": _QWEN3_5_VL,
    "MiniCPMV4_[67]ForConditionalGeneration": {
        "text_config": _QWEN3_5 | {"model_type": "qwen3_5_text"}
    },
    "Kimi(K3)?LinearForCausalLM": _KIMI_LINEAR,
    "KimiK3ForConditionalGeneration": {"text_config": _KIMI_LINEAR},
    "KimiK25ForConditionalGeneration": {"text_config": _DEEPSEEK},
    "MiMoV2(Flash)?ForCausalLM": _MIMO_V2,
    "MiniMaxM3SparseForCausalLM": UNKNOWN | _MINIMAX_M3,
    "MiniMaxM3SparseForConditionalGeneration": {
        "text_config": UNKNOWN | _MINIMAX_M3 | {"model_type": "minimax_m3"},
        "vision_config": _MINIMAX_M3_VISION | {"model_type": "minimax_vision"},
    },
    "DeepseekV4ForCausalLM": _DEEPSEEK_V4,
    "DeepseekOCRForCausalLM|UnlimitedOCRForCausalLM": {
        "language_config": {"architectures": ["DeepseekV2ForCausalLM"]},
        "tile_tag": "2D",
    },
    "Glm5Next.*": {
        "text_config": _GLM5_NEXT,
        **_GLM5_NEXT,
    },
    "Lfm2MoeForCausalLM": {"layer_types": ["conv", "conv", _FULL] * 4, "num_hidden_layers": 12},
    "Step3p5ForCausalLM": {
        "num_hidden_layers": 12,
        "layer_types": [_FULL, _SLIDING, _SLIDING, _SLIDING] * 3,
        "moe_layers_enum": "3,4,5,6,7,8,9,10,11",
        "sliding_window": 512,
    },
    "NemotronH_(Nano_)?Omni_Reasoning_V3": {"video_temporal_patch_size": 2},
    "Lfm2(ForCausalLM|BidirectionalModel)": {"layer_types": ["conv", "conv", "full_attention"] * 4},
}

_FEW_KIMI_LAYERS = {
    "num_hidden_layers": 3,
    "linear_attn_config": {"kda_layers": [1, 2], "full_attn_layers": [3]},
    "layer_types": ["linear_attention", "linear_attention", "full_attention"],
}

# Architectures (a regular expression) to keys of the small `config.json`; None leaves a key out.
KEYS: dict[str, dict[str, Any]] = {
    "DeepseekV4ForCausalLM": {"o_groups": 2},
    "MiMoV2FlashForCausalLM": {"rope_parameters": {"rope_type": "default", "rope_theta": 5e6}},
    "GraniteMoeHybridForCausalLM": {"mamba_n_heads": 8, "mamba_d_head": 64},
    "Mamba2ForCausalLM": {"num_heads": 8, "head_dim": 64},
    "NemotronH_(Nano_)?Omni_Reasoning_V3": {"video_temporal_patch_size": 2},
    "MiniMaxM3SparseForConditionalGeneration": {
        "text_config": {"shared_intermediate_size": 512},
        "projector_hidden_size": 256,
    },
    "MiniMaxM3Sparse.*": {"shared_intermediate_size": 512},
    "Kimi(K3)?LinearForCausalLM": _FEW_KIMI_LAYERS,  # theirs are counted from one
    "KimiK3ForConditionalGeneration": {"text_config": _FEW_KIMI_LAYERS},
    "Gemma2For.*": {"hidden_act": "gelu_pytorch_tanh"},
    # SGLang's scheduler reads these; the model does not.
    "Gemma4ForCausalLM": {"swa_num_key_value_heads": 2, "swa_head_dim": 64},
    ".*NextN": {"num_nextn_predict_layers": 1},
    "Contriever": {"hidden_act": "gelu"},
    "Exaone4ForCausalLM": {"sliding_window_pattern": "LG"},
    "DbrxForCausalLM": {"ffn_config": {"moe_normalize_expert_weights": 1.0}},
    "DFlash.*|LiLiCorr.*|LingDSpark.*|.*DSparkDraftModel|Qwen3DSparkModel|MiniMaxDFlash2.*": {
        "num_target_layers": 8,
        "markov_rank": 32,
        "markov_head_type": "vanilla",
        "dflash_config": {"selector_rank": 32, "selector_top_k": 4},
    },
    "Eagle3DeepseekV2ForCausalLM": {"num_hidden_layers": 1},
}


def matching(table: dict[str, dict[str, Any]], architecture: str) -> dict[str, Any]:
    """What a table says of an architecture."""
    found: dict[str, Any] = {}
    for pattern, keys in table.items():
        if re.fullmatch(pattern, architecture):
            found |= keys
    return found


# Keys that models read and their config classes lack, to what files on the hub have.
ROUTING = ("num_experts_per_tok", "n_group", "topk_group")  # never None where there are experts
DEFAULTS: dict[str, Any] = {
    "index_topk": 64,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "position_embedding_type": "absolute",
    "num_target_layers": 4,
    "num_nextn_predict_layers": 1,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "is_moe_layer": [False, True],
    "hybrid_layer_pattern": [0, 1],
    "layer_types": ["full_attention", "full_attention"],
    "layers_block_type": ["attention", "attention"],
    "full_attention_interval": 2,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "embedding_dropout": 0.0,
    "output_dropout": 0.0,
    "attention_dropout": 0.0,
    "in_channels": 3,
    "in_chans": 3,
    "num_channels": 3,
    "image_size": 56,
    "patch_size": 14,
    "image_token_id": 3,
    "video_token_id": 4,
    "o_groups": 2,
    "n_groups": 1,
    "scale_emb": 1.0,
    "scale_depth": 1.0,
    "dim_model_base": 256,
    "num_shared_experts": 1,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "rope_theta": 10000.0,
    "rope_scaling": None,
    "partial_rotary_factor": 1.0,
    "rms_norm_eps": 1e-6,
    "layer_norm_eps": 1e-6,
    "layer_norm_epsilon": 1e-6,
    "hidden_act": "silu",
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.0,
    "sliding_window": None,
}
