"""What can't be read off a config class: for a few models, the config that they take or a size in the small one."""

from __future__ import annotations

import re
from typing import Any

# Architecture to the `model_type` of a config that it takes, or to a class of `transformers`.
BASES: dict[str, str] = {
    "MistralLarge3ForCausalLM": "deepseek_v3",
    "MistralLarge3ForCausalLMEagle": "deepseek_v3",
    "DeciLMForCausalLM": "",
    "DeepseekV4ForCausalLMDSpark": "deepseek_v4",
    "Ernie4_5_VLMoeForConditionalGeneration": "",
    "InternVLChatModel": "internvl_chat",
    "PixtralForConditionalGeneration": "",
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

_FEW_KIMI_LAYERS = {
    "num_hidden_layers": 3,
    "attn_res_block_size": 2,  # K3's checkpoint has it
    "linear_attn_config": {"kda_layers": [1, 2], "full_attn_layers": [3]},
    "layer_types": ["linear_attention", "linear_attention", "full_attention"],
}

_OF_EVERY_CONFIG = (
    *("_name_or_path", "architectures", "chunk_size_feed_forward", "dtype", "id2label", "label2id"),
    *("is_encoder_decoder", "output_attentions", "output_hidden_states", "problem_type"),
    *("return_dict", "transformers_version"),
)

# Architectures (a regular expression) to keys of the small `config.json`; None leaves a key out.
KEYS: dict[str, dict[str, Any]] = {
    "DeepseekV4ForCausalLM(DSpark)?": {"o_groups": 2},
    "DeepseekV4ForCausalLMDSpark": {
        "dspark_block_size": 4,
        "dspark_markov_rank": 32,
        "dspark_target_layer_ids": [1, 2],
    },
    "Dots3NoteForCausalLMNextN": {"layer_types": ["sliding_attention"], "num_hidden_layers": 1},
    "DeepseekVL2ForCausalLM": {"projector_config": {"n_embed": 256}},
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
    "DeciLMForCausalLM": {
        "num_hidden_layers": 3,
        "block_configs": [
            {
                "attention": {"no_op": False, "n_heads_in_group": 2},
                "ffn": {"no_op": False, "ffn_mult": 2.0},
            },
            {"attention": {"no_op": True}, "ffn": {"no_op": False, "ffn_mult": 1.0}},
            {"attention": {"no_op": False, "n_heads_in_group": 4}, "ffn": {"no_op": True}},
        ],
    },
    "DeepseekOCRForCausalLM": {"language_config": {"use_mla": False}},
    "LlavaForConditionalGeneration": {"vision_feature_select_strategy": "full"},
    "Step3p5MTP": {  # its layer is that of number 45, whatever the model has
        "num_hidden_layers": 46,
        "layer_types": ["full_attention"] * 46,
        "rope_theta": [1e4] * 46,
        "swiglu_limits": [0.0] * 46,
        "swiglu_limits_shared": [0.0] * 46,
        "partial_rotary_factors": [1.0] * 46,
    },
    "(Llava(Llama|Mistral|Qwen|Vid)|YiVL)ForCausalLM": {
        "mm_hidden_size": 256,
        "mm_vision_select_layer": -2,
        "mm_vision_select_feature": "patch",
        "projector_hidden_act": "gelu",
        "image_token_index": 3,
    },
    "Contriever": {"hidden_act": "gelu"},
    "Exaone4ForCausalLM": {"sliding_window_pattern": "LG"},
    "DbrxForCausalLM": {
        # It writes keys into its parts that these do not take.
        "attn_config": dict.fromkeys(_OF_EVERY_CONFIG),
        "ffn_config": {
            **dict.fromkeys((*_OF_EVERY_CONFIG, "uniform_expert_assignment")),
            "moe_normalize_expert_weights": 1.0,
        },
    },
    "DSparkMiniMaxDraftModel": {
        "block_size": 4,
        "moe_layer_freq": [0, 0],
        "num_target_layers": 8,
        "markov_rank": 32,
        "markov_head_type": "vanilla",
        "use_gemma_norm": True,
        "dflash_config": {"target_layer_ids": [1, 2], "mask_token_id": 3},
    },
    "InklingForConditionalGeneration": {
        "text_config": {
            "num_hidden_layers": 3,
            "local_layer_ids": [0, 1],
            "dense_mlp_idx": 1,
            "sliding_window_size": 32,
        },
    },
    "IQuestQ1ForCausalLM": {
        "num_hidden_layers": 3,
        "hybrid_layers_types_block": ["sliding_attention"],
        "num_hybrid_layers_block": 1,
        "last_layers_types": ["full_attention"],
    },
    "MuseSparkForConditionalGeneration": {"out_hidden_size": 1024},
    "MuseGlimmerAssistantModel": {"num_target_layers": 8},
    "NemotronHForCausalLMMTP": {"num_nextn_predict_layers": 1},
    "DFlash.*|LiLiCorr.*|LingDSpark.*|.*DSparkDraftModel|Qwen3DSparkModel|MiniMaxDFlash2.*": {
        "num_target_layers": 8,
        "markov_rank": 32,
        "markov_head_type": "vanilla",
        "dflash_config": {"selector_rank": 32, "selector_top_k": 4},
    },
    "Eagle3DeepseekV2ForCausalLM": {"num_hidden_layers": 1},
    "Ernie4_5_VLMoeForConditionalGeneration": {
        "moe_num_experts": [4, 4],
        "moe_intermediate_size": [512, 512],
        "moe_layer_end_index": [1, 1],
    },
    "Glm5Next.*": {"num_key_value_heads": 4, "text_config": {"num_key_value_heads": 4}},
    "Glm5NextForConditionalGenerationNextN": {
        "text_config": {
            "architectures": ["Glm5NextForConditionalGenerationNextN"],
            "num_key_value_heads": 4,
            "linear_attn_config": {"kda_layers": []},
        },
    },
    "LongcatFlashForCausalLM(NextN)?": {
        "rope_parameters": None,
        "rope_scaling": {"rope_type": "default", "rope_theta": 1e7},
    },
}


# Architectures (a regular expression) that SGLang serves with its radix cache only.
_WITH_RADIX_CACHE = "InklingForConditionalGeneration"


def radix_cache(architecture: str) -> list[str]:
    """Arguments of SGLang's server that do without the cache, where SGLang does."""
    return [] if re.fullmatch(_WITH_RADIX_CACHE, architecture) else ["--disable-radix-cache"]


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
    "index_topk_freq": 1,
    "index_skip_topk_offset": 2,
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
