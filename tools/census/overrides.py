"""What can't be read off a config class: for a few models, the config that they take or a size in it."""

from __future__ import annotations

from typing import Any

# Architecture to the `model_type` of a config that it takes.
BASES: dict[str, str] = {
    "TransformersEmbeddingModel": "llama",
    "TransformersForCausalLM": "llama",
    "TransformersForSequenceClassification": "llama",
    "TransformersMoEEmbeddingModel": "qwen3_moe",
    "TransformersMoEForCausalLM": "qwen3_moe",
    "TransformersMoEForSequenceClassification": "qwen3_moe",
}

# Architecture to arguments without which its config class can't be made.
ARGUMENTS: dict[str, dict[str, Any]] = {
    "AfmoeForCausalLM": {"num_experts": 4},
    "Gemma4ForConditionalGeneration": {"vision_config": {}},
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

# Architecture to keys of its `config.json`; None leaves a key out.
KEYS: dict[str, dict[str, Any]] = {
    "DeepseekV4ForCausalLM": {"sliding_window": 64, "compress_ratios": [0, 4]},
    "Gemma2ForCausalLM": {"hidden_act": "gelu_pytorch_tanh"},
    "Gemma2ForSequenceClassification": {"hidden_act": "gelu_pytorch_tanh"},
    # SGLang's scheduler reads these; the model does not.
    "Gemma4ForCausalLM": {"swa_num_key_value_heads": 2, "swa_head_dim": 64},
}

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
