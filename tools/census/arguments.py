"""What files on the hub say and the defaults of a config class do not: arguments, of the real size."""

from __future__ import annotations

from typing import Any

from .overrides import UNKNOWN

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
_GLM5_NEXT: dict[str, Any] = {
    "index_topk": 64,
    "index_n_heads": 32,
    "index_head_dim": 128,
    "index_topk_freq": 1,
    "index_skip_topk_offset": 2,
    "architectures": ["Glm5NextForConditionalGeneration"],
    "num_key_value_heads": 64,
    "swiglu_limit": 7.0,
}
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

_MROPE = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [16, 8, 8]}
_DEEPSEEK_V2_LITE: dict[str, Any] = {
    "architectures": ["DeepseekV2ForCausalLM"],
    "num_hidden_layers": 27,
    "first_k_dense_replace": 1,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "num_experts_per_tok": 6,
    "topk_method": "greedy",
    "n_group": 1,
    "topk_group": 1,
    "q_lora_rank": None,
    "moe_intermediate_size": 1408,
}
_DEEPSEEK_V3: dict[str, Any] = {
    "num_hidden_layers": 61,
    "first_k_dense_replace": 3,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "n_group": 8,
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "moe_intermediate_size": 2048,
}
_ERNIE_VL: dict[str, Any] = {
    "num_hidden_layers": 28,
    "moe_num_experts": [64, 64],
    "moe_intermediate_size": [1536, 512],
    "moe_layer_start_index": [1, 1],
    "moe_layer_end_index": [27, 27],
    "moe_layer_interval": 1,
    "moe_k": 6,
    "moe_num_shared_experts": 2,
    "freq_allocation": 20,
    "use_bias": False,
    "rope_parameters": {"rope_type": "default", "rope_theta": 5e5, "mrope_section": [12, 12, 8]},
    "spatial_conv_size": 2,
    "temporal_conv_size": 2,
    "use_temporal_conv": True,
    "pixel_hidden_size": 1280,
    "vision_config": {
        "depth": 32,
        "embed_dim": 1280,
        "hidden_size": 1280,
        "hidden_act": "quick_gelu",
        "in_channels": 3,
        "mlp_ratio": 4,
        "num_heads": 16,
        "patch_size": 14,
        "spatial_merge_size": 2,
        "rms_norm_eps": 1e-6,
    },
}
_GEMMA4_ASSISTANT: dict[str, Any] = {
    "hidden_size_per_layer_input": 0,
    "vocab_size_per_layer_input": 0,
    "num_hidden_layers": 4,
    "num_kv_shared_layers": 4,
    "layer_types": [*["sliding_attention"] * 3, "full_attention"],
}
_LILICORR = {
    "lilicorr_enabled": True,
    "lilicorr_candidate_topk": 16,
    "lilicorr_hidden_size": 0,
    "lilicorr_num_layers": 2,
    "lilicorr_num_heads": 4,
    "lilicorr_mlp_ratio": 4.0,
    "lilicorr_factor_dim": 64,
    "lilicorr_vector_eps": 1e-6,
    "lilicorr_logit_scale": 1.0,
}
_PIXTRAL: dict[str, Any] = {
    "hidden_size": 1024,
    "num_channels": 3,
    "image_size": 1024,
    "patch_size": 16,
    "intermediate_size": 4096,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "rope_theta": 10000.0,
    "image_token_id": 10,
}
_MLP = {"depth": 2, "projector_type": "mlp_gelu"}
_JANUS: dict[str, Any] = {
    "aligner_config": {"cls": "MlpProjector", "params": _MLP | {"input_dim": 1024, "n_embed": 256}},
    "gen_aligner_config": {
        "cls": "MlpProjector",
        "params": _MLP | {"input_dim": 8, "n_embed": 256},
    },
    "gen_head_config": {
        "cls": "vision_head",
        "params": {"image_token_embed": 256, "image_token_size": 1024, "n_embed": 256},
    },
    "gen_vision_config": {"cls": "VQ-16", "params": {"image_token_size": 1024, "n_embed": 8}},
    "vision_config": {
        "cls": "CLIPVisionTower",
        "params": {
            "image_size": 384,
            "model_name": "siglip_large_patch16_384",
            "select_feature": "same",
            "select_layer": 2,
        },
    },
    "language_config": UNKNOWN,
}
_JET: dict[str, Any] = {
    "num_hidden_layers": 12,
    "layer_types": ["jet", "jet", "attn", "jet", "swa", "jet"] * 2,
    "rope_scaling": None,
    "initializer_range": 0.02,
    "efficient_attention_config": {
        "jet": {
            "mode": "chunk",
            "expand_v": 2.0,
            "num_heads": 12,
            "head_dim": 96,
            "norm_eps": 1e-5,
            "conv_size": 4,
            "dconv_generator_reduction": 8,
            "dconv_implementation": "triton",
        },
        "swa": {"window_size": 1152},
    },
}
_DASHENG: dict[str, Any] = {
    "n_fft": 512,
    "hop_length": 160,
    "win_length": 512,
    "center": True,
    "f_min": 0.0,
    "f_max": 8000.0,
    "n_mels": 64,
    "sample_rate": 16000,
    "target_length": 1008,
    "embed_dim": 1280,
    "input_channels": 1,
    "patch_size": [64, 4],
    "patch_stride": [64, 4],
    "num_heads": 16,
    "mlp_ratio": 4.0,
    "qkv_bias": True,
    "init_values": None,
    "depth": 32,
}
_PHI3_SMALL: dict[str, Any] = {
    "rope_embedding_base": 1000000,
    "rope_position_scale": 1.0,
    "mup_use_scaling": True,
    "mup_attn_multiplier": 1.0,
    "mup_embedding_multiplier": 10.0,
    "mup_width_multiplier": 8.0,
    "gegelu_limit": 20.0,
    "hidden_act": "gegelu",
    "layer_norm_epsilon": 1e-5,
    "dense_attention_every_n_layers": 2,
    "blocksparse_block_size": 64,
    "blocksparse_homo_head_pattern": False,
    "blocksparse_num_local_blocks": 16,
    "blocksparse_vert_stride": 8,
    "blocksparse_triton_kernel_block_size": 64,
    "dummy_token_indices": [500, 501],
}
_STEP3P5: dict[str, Any] = {
    "num_hidden_layers": 12,
    "layer_types": [_FULL, _SLIDING, _SLIDING, _SLIDING] * 3,
    "moe_layers_enum": "3,4,5,6,7,8,9,10,11",
    "sliding_window": 512,
    "rope_theta": [5e6, 1e4, 1e4, 1e4] * 3,
    "attention_other_setting": {"num_attention_heads": 96, "num_attention_groups": 8},
    "use_head_wise_attn_gate": True,
    "use_moe_router_bias": True,
    "moe_router_scaling_factor": 3.0,
    "need_fp32_gate": True,
    "scale_emb": 1.0,
    "swiglu_limits": [0.0] * 12,
    "swiglu_limits_shared": [0.0] * 12,
    "partial_rotary_factors": [0.5, 1.0, 1.0, 1.0] * 3,
}
_PERCEPTION: dict[str, Any] = {
    "width": 1536,
    "layers": 47,
    "heads": 16,
    "num_channels": 3,
    "image_size": 728,
    "patch_size": 14,
    "mlp_ratio": 8960 / 1536,
    "hidden_act": "quick_gelu",
    "layer_norm_eps": 1e-5,
    "use_cls_token": False,
    "use_ln_pre": True,
    "use_ln_post": False,
    "use_abs_posemb": True,
    "use_rope2d": True,
    "ls_init_value": 0.1,
    "output_dim": None,
    "pool_type": "none",
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
        "language_config": _DEEPSEEK_V2_LITE,
        "tile_tag": "2D",
    },
    "Glm5Next.*": {
        "text_config": _GLM5_NEXT,
        **_GLM5_NEXT,
    },
    "Lfm2MoeForCausalLM": {"layer_types": ["conv", "conv", _FULL] * 4, "num_hidden_layers": 12},
    "Step3p5ForCausalLM": _STEP3P5,
    "NemotronH_(Nano_)?Omni_Reasoning_V3": {"video_temporal_patch_size": 2},
    "BailingMM2?NativeForConditionalGeneration": {
        "mlp_depth": 2,
        "llm_config": {
            "num_key_value_heads": 4,
            "intermediate_size": 5120,
            "moe_intermediate_size": 512,
            "num_experts": 256,
            "num_experts_per_tok": 8,
            "num_shared_experts": 1,
            "first_k_dense_replace": 1,
            "use_qk_norm": True,
            "use_bias": False,
            "score_function": "sigmoid",
            "moe_router_enable_expert_bias": True,
            "rope_parameters": _MROPE,
        },
        "vision_config": {"architectures": ["Qwen3_VisionTransformer"]},
    },
    "ExaoneMo[eE]ForCausalLM": {"num_hidden_layers": 48, "is_moe_layer": [False, *[True] * 47]},
    "DeciLMForCausalLM": {
        "block_configs": [
            {
                "attention": {"no_op": False, "n_heads_in_group": 8},
                "ffn": {"no_op": False, "ffn_mult": 2.0},
            },
            {"attention": {"no_op": True}, "ffn": {"no_op": False, "ffn_mult": 1.0}},
            {"attention": {"no_op": False, "n_heads_in_group": 4}, "ffn": {"no_op": True}},
        ]
        * 4,
        "num_hidden_layers": 12,
    },
    "DeepseekVL2ForCausalLM": {"language_config": _DEEPSEEK_V2_LITE, "tile_tag": "2D"},
    "DotsVLMForCausalLM": UNKNOWN | _DEEPSEEK_V3,
    "Gemma4AssistantForCausalLM": {"text_config": _GEMMA4_ASSISTANT},
    "InternS1ForConditionalGeneration": {
        "downsample_ratio": 0.5,
        "vision_feature_layer": -1,
        "vision_config": {
            "drop_path_rate": 0.0,
            "dropout": 0.0,
            "qk_normalization": True,
            "qkv_bias": False,
            "initializer_factor": 0.1,
        },
    },
    "InternVLChatModel": {
        "vision_config": {"architectures": ["InternVisionModel"], "norm_type": "layer_norm"}
    },
    "LlavaForConditionalGeneration": {"vision_config": {"model_type": "pixtral"}},
    "MiMoV2ASRForCausalLM": {"audio_config": {"input_local_dim": 1024, "out_hidden_size": 256}},
    "LiLiCorrDraftModel": {"dflash_config": _LILICORR},
    "PixtralForConditionalGeneration": UNKNOWN
    | {"vision_config": _PIXTRAL, "text_config": UNKNOWN},
    "MultiModalityCausalLM": _JANUS,
    "DiffusionGemmaForBlockDiffusion": {
        "vision_config": {},
        "text_config": {"num_experts": 128, "top_k_experts": 8, "moe_intermediate_size": 704},
    },
    "Ernie4_5_VLMoeForConditionalGeneration": _ERNIE_VL,
    "JetNemotronForCausalLM": UNKNOWN | _JET,
    "JetVLMForConditionalGeneration": {"text_config": UNKNOWN | _JET},
    "K2HorizonForCausalLM": {
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
        "mlp_only_layers": [0, 1],
    },
    "LlamaForClassification": {"classification_out_size": 768},
    "MiMoV2MTP": _MIMO_V2,
    "MiDashengLMModel": {
        "subsample_factor": 5,
        "audio_encoder_config": _DASHENG,
        "text_config": UNKNOWN | {"rope_parameters": _MROPE},
    },
    "MiniCPM[VO]": {"query_num": 64, "drop_vision_last_layer": False},
    "MiniCPMV": {"version": 2.6},
    "MiniCPMO": {
        "version": 2.6,
        "init_vision": True,
        "init_audio": True,
        "init_tts": False,
        "audio_pool_step": 2,
    },
    "MuseGlimmer(ForCausalLM|ForConditionalGeneration)": {
        "layer_types": [_FULL, *[_SLIDING] * 3] * 13,
        "no_rope_layers": [0, 1, 1, 1] * 13,
    },
    "MuseGlimmerForConditionalGeneration": {
        "vision_config": {"attention_types": [*["window_attention"] * 4, "full_attention"] * 10},
    },
    "NemotronH_Nano_(VL_V2|Omni_Reasoning_V3)|NemotronH_Omni_Reasoning_V3": {
        "llm_config": {"model_type": "nemotron_h"},
        "vision_config": {
            "args": {"model": "vit_small_patch16_224", "register_multiple": 8},
            "image_size": 224,
            "patch_size": 16,
        },
    },
    "Phi3SmallForCausalLM": UNKNOWN | _PHI3_SMALL,
    "Phi4MMForCausalLM": {
        "embd_layer": {
            "audio_embd_layer": {
                "embedding_cls": "audio",
                "compression_rate": 8,
                "downsample_rate": 1,
                "projection_cls": "mlp",
                "use_conv_downsample": False,
                "use_qformer": False,
            },
        },
    },
    "SolarForCausalLM": {
        "bskcn_1": [0, 4],
        "bskcn_2": [1],
        "bskcn_3": [2, 6],
        "bskcn_4": [3],
        "bskcn_tv": [0.9, 0.8],
    },
    "Step3p5MTP": _STEP3P5,
    "Step3p7ForConditionalGeneration": {"text_config": _STEP3P5},
    "Step3VLForConditionalGeneration": {
        "text_config": {"moe_layers_enum": "4,5,6,7,8,9,10,11", "num_hidden_layers": 12}
    },
    "StepVLForConditionalGeneration": {"vision_config": _PERCEPTION, "projector_bias": False},
    "Lfm2(ForCausalLM|BidirectionalModel)": {"layer_types": ["conv", "conv", "full_attention"] * 4},
}

# Architectures (a regular expression) to parts of their config that are another's: of an architecture, or of a
# `model_type`.
PARTS: dict[str, dict[str, str]] = {
    "BailingMM2?NativeForConditionalGeneration": {
        "llm_config": "BailingMoeV2ForCausalLM",
        "vision_config": "qwen3_vl_moe_vision",
    },
    "Glm5Next.*": {"vision_config": "glm5_next_vision"},
    "Gemma4(Unified)?AssistantForCausalLM": {"text_config": "gemma4_text"},
    "InternS1ForConditionalGeneration": {
        "text_config": "Qwen3ForCausalLM",
        "vision_config": "internvl_vision",
    },
    "InternVLChatModel": {"llm_config": "Qwen3ForCausalLM"},
    "InternS1ProForConditionalGeneration": {
        "text_config": "qwen3_vl_moe_text",
        "vision_config": "qwen3_vl_moe_vision",
    },
    "LlavaForConditionalGeneration": {"text_config": "LlamaForCausalLM"},
    "MiniCPM[VO]": {"vision_config": "siglip_vision_model"},
    "MiniCPMO": {"audio_config": "whisper"},
    "StepVLForConditionalGeneration": {"text_config": "Qwen3ForCausalLM"},
}
