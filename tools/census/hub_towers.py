"""The same of models that see or hear."""

from __future__ import annotations

from typing import Any

from .overrides import UNKNOWN

MINIMAX_M3_VISION: dict[str, Any] = {
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
ERNIE_VL: dict[str, Any] = {
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
PIXTRAL: dict[str, Any] = {
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
JANUS: dict[str, Any] = {
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
DASHENG: dict[str, Any] = {
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
PERCEPTION: dict[str, Any] = {
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
