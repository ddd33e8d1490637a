"""What files on the hub say and the defaults of a config class do not: arguments, of the real size."""

from __future__ import annotations

from typing import Any

from .hub_text import (
    DEEPSEEK,
    DEEPSEEK_V2_LITE,
    DEEPSEEK_V3,
    DEEPSEEK_V4,
    FULL,
    GEMMA4_ASSISTANT,
    GLM5_NEXT,
    INKLING,
    JET,
    KIMI_LINEAR,
    LILICORR,
    MIMO_V2,
    MINIMAX_M3,
    MROPE,
    PHI3_SMALL,
    QWEN3_5,
    QWEN3_5_VL,
    SLIDING,
    STEP3P5,
    YARN,
)
from .hub_towers import CONFORMER, DASHENG, ERNIE_VL, JANUS, MINIMAX_M3_VISION, PERCEPTION, PIXTRAL
from .overrides import UNKNOWN

# Architectures (a regular expression) to what files on the hub say and the defaults of the config class do not:
# its arguments, of the real size.
ARGUMENTS: dict[str, dict[str, Any]] = {
    "AfmoeForCausalLM": {"num_experts": 4, "num_dense_layers": 2},
    "Gemma4ForConditionalGeneration": {"vision_config": {}},
    "Qwen3NextForCausalLM(MTP)?": {"full_attention_interval": 4},
    "Qwen3_5(Moe)?ForCausalLM": QWEN3_5,
    "Qwen3_5(Moe)?ForConditionalGeneration|Qwen3_5ForCausalLMMTP": QWEN3_5_VL,
    "InklingForConditionalGeneration": {"text_config": INKLING},
    "InternS2PreviewForConditionalGeneration": QWEN3_5_VL,
    "InternS2MobiusForConditionalGeneration": {
        "text_config": QWEN3_5
        | {"num_hidden_layers": 12, "layer_types": [*["linear_attention"] * 3, FULL] * 3},
        "vision_config": {"deepstack_visual_indexes": []},
    },
    "MiniCPMV4_[67]ForConditionalGeneration": {
        "text_config": QWEN3_5 | {"model_type": "qwen3_5_text"}
    },
    "Kimi(K3)?LinearForCausalLM": KIMI_LINEAR,
    "KimiK3ForConditionalGeneration": {"text_config": KIMI_LINEAR},
    "KimiK25ForConditionalGeneration": {"text_config": DEEPSEEK},
    "KimiVLForConditionalGeneration": {"text_config": YARN},
    "MiMoV2(Flash)?ForCausalLM": MIMO_V2,
    "MiniMaxM3SparseForCausalLM": UNKNOWN | MINIMAX_M3,
    "MiniMaxM3SparseForConditionalGeneration": {
        "text_config": UNKNOWN | MINIMAX_M3 | {"model_type": "minimax_m3"},
        "vision_config": MINIMAX_M3_VISION | {"model_type": "minimax_vision"},
    },
    "DeepseekV4ForCausalLM(DSpark)?": DEEPSEEK_V4,
    "DeepseekVL2ForCausalLM": {
        "language_config": DEEPSEEK_V2_LITE,
        "tile_tag": "2D",
    },
    "DeepseekOCRForCausalLM|UnlimitedOCRForCausalLM": {
        "language_config": DEEPSEEK_V2_LITE,
        "tile_tag": "2D",
    },
    "Glm5Next.*": {
        "text_config": GLM5_NEXT,
        **GLM5_NEXT,
    },
    "Lfm2MoeForCausalLM": {"layer_types": ["conv", "conv", FULL] * 4, "num_hidden_layers": 12},
    "Step3p5ForCausalLM": STEP3P5,
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
            "rope_parameters": MROPE,
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
    "DotsVLMForCausalLM": UNKNOWN | DEEPSEEK_V3,
    "Gemma4AssistantForCausalLM": {"text_config": GEMMA4_ASSISTANT},
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
    "LiLiCorrDraftModel": {"dflash_config": LILICORR},
    "PixtralForConditionalGeneration": UNKNOWN | {"vision_config": PIXTRAL, "text_config": UNKNOWN},
    "MultiModalityCausalLM": JANUS,
    "DiffusionGemmaForBlockDiffusion": {
        "vision_config": {},
        "text_config": {"num_experts": 128, "top_k_experts": 8, "moe_intermediate_size": 704},
    },
    "Ernie4_5_VLMoeForConditionalGeneration": ERNIE_VL,
    "Grok1(Model)?ForCausalLM": {
        "embedding_multiplier_scale": 78.38,
        "output_multiplier_scale": 0.577,
    },
    "JetNemotronForCausalLM": UNKNOWN | JET,
    "JetVLMForConditionalGeneration": {"text_config": UNKNOWN | JET},
    "K2HorizonForCausalLM": {
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
        "mlp_only_layers": [0, 1],
    },
    "LlamaForClassification": {"classification_out_size": 768},
    "MiMoV2MTP": MIMO_V2,
    "MiDashengLMModel": {
        "subsample_factor": 5,
        "audio_encoder_config": DASHENG,
        "text_config": UNKNOWN | {"rope_parameters": MROPE},
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
    "MuseGlimmerAssistantModel": UNKNOWN,
    "MuseGlimmer(ForCausalLM|ForConditionalGeneration)": {
        "layer_types": [FULL, *[SLIDING] * 3] * 13,
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
    "Phi3SmallForCausalLM": UNKNOWN | PHI3_SMALL,
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
        "audio_processor": {"name": "cascades", "config": CONFORMER},
    },
    "SolarForCausalLM": {
        "bskcn_1": [0, 4],
        "bskcn_2": [1],
        "bskcn_3": [2, 6],
        "bskcn_4": [3],
        "bskcn_tv": [0.9, 0.8],
    },
    "Step3p5MTP": STEP3P5,
    "Step3p7ForConditionalGeneration": {"text_config": STEP3P5},
    "Step3VLForConditionalGeneration": {
        "text_config": {"moe_layers_enum": "4,5,6,7,8,9,10,11", "num_hidden_layers": 12}
    },
    "StepVLForConditionalGeneration": {"vision_config": PERCEPTION, "projector_bias": False},
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
