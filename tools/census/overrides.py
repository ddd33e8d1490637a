"""What can't be read off a config class: for a few models, the config that they take or a size in it."""

from __future__ import annotations

import re
from typing import Any

# Architecture to the `model_type` of a config that it takes.
BASES: dict[str, str] = {
    "Qwen3_5ForCausalLM": "qwen3_5_text",
    "Qwen3_5MoeForCausalLM": "qwen3_5_moe_text",
    "TransformersEmbeddingModel": "llama",
    "TransformersForCausalLM": "llama",
    "TransformersForSequenceClassification": "llama",
    "TransformersMoEEmbeddingModel": "qwen3_moe",
    "TransformersMoEForCausalLM": "qwen3_moe",
    "TransformersMoEForSequenceClassification": "qwen3_moe",
}

_KIMI_LINEAR: dict[str, Any] = {
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

# Architectures (a regular expression) to what files on the hub say and the defaults of the config class do not:
# its arguments, of the real size.
ARGUMENTS: dict[str, dict[str, Any]] = {
    "AfmoeForCausalLM": {"num_experts": 4, "num_dense_layers": 2},
    "Gemma4ForConditionalGeneration": {"vision_config": {}},
    "Qwen3NextForCausalLM(MTP)?": {"full_attention_interval": 4},
    "Qwen3_5(Moe)?ForCausalLM": _QWEN3_5,
    "Qwen3_5(Moe)?ForConditionalGeneration|Qwen3_5ForCausalLMMTP": _QWEN3_5_VL,
    "InternS2(Preview|Mobius)ForConditionalGeneration": _QWEN3_5_VL,
    "MiniCPMV4_[67]ForConditionalGeneration": _QWEN3_5_VL,
    "Kimi(K3)?LinearForCausalLM": _KIMI_LINEAR,
    "KimiK3ForConditionalGeneration": {"text_config": _KIMI_LINEAR},
    "KimiK25ForConditionalGeneration": {"text_config": _DEEPSEEK},
    "Lfm2(ForCausalLM|BidirectionalModel)": {"layer_types": ["conv", "conv", "full_attention"] * 4},
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

# Architectures (a regular expression) to keys of the small `config.json`; None leaves a key out.
KEYS: dict[str, dict[str, Any]] = {
    "Gemma2For.*": {"hidden_act": "gelu_pytorch_tanh"},
    # SGLang's scheduler reads these; the model does not.
    "Gemma4ForCausalLM": {"swa_num_key_value_heads": 2, "swa_head_dim": 64},
    "Contriever": {"hidden_act": "gelu"},
    "Exaone4ForCausalLM": {"sliding_window_pattern": "LG"},
    "DbrxForCausalLM": {"ffn_config": {"moe_normalize_expert_weights": 1.0}},
    "DFlash.*|LiLiCorr.*|LingDSpark.*|.*DSparkDraftModel|Qwen3DSparkModel|MiniMaxDFlash2.*": {
        "num_target_layers": 8
    },
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
