"""The model families of the tests: small configurations of the real `transformers` classes.

A new family is one entry of `_FAMILIES`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

_DENSE: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 512,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}

_VISION: dict[str, Any] = {
    "depth": 2,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_heads": 2,
    "out_hidden_size": _DENSE["hidden_size"],
}

_QWEN_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 256}

# Routing of DeepSeek-V3 and GLM-4.5: two groups (or one), a bias that corrects the choice only.
_GROUPED_EXPERTS: dict[str, Any] = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 256,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.5,
    "norm_topk_prob": True,
}


@dataclass(frozen=True)
class Family:
    """One `model_type` of `transformers`, made small.

    Attributes:
        sizes: what differs from `_DENSE`; of the language model where there is a vision tower.
        vision: the `vision_config` of a multimodal model.
        embedding_std: of the embedding's values.
        config_json: keys of the hub's `config.json` that `transformers` 5 has under other names.
    """

    sizes: dict[str, Any] = field(default_factory=dict)
    vision: dict[str, Any] = field(default_factory=dict)
    embedding_std: float = 0.15
    config_json: dict[str, Any] = field(default_factory=dict)


_FAMILIES: dict[str, Family] = {
    "llama": Family(),
    "mistral": Family(),
    "qwen2": Family(),
    "qwen3": Family(),
    # Tied, and scaled up by 16: with larger values it would repeat its last token with certainty.
    "gemma3_text": Family(
        {"query_pre_attn_scalar": 64, "tie_word_embeddings": True}, embedding_std=0.02
    ),
    # Fused on disk: `qkv_proj` and `gate_up_proj` are one tensor each.
    "phi3": Family(),
    "mixtral": Family({"num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen2_moe": Family({**_QWEN_EXPERTS, "shared_expert_intermediate_size": 256}),
    "qwen3_moe": Family({**_QWEN_EXPERTS, "norm_topk_prob": True}),
    "glm4_moe": Family(
        {**_GROUPED_EXPERTS, "n_group": 1, "topk_group": 1, "num_nextn_predict_layers": 0}
    ),
    "deepseek_v3": Family(
        {
            **_GROUPED_EXPERTS,
            "n_routed_experts": 8,
            "n_group": 2,
            "topk_group": 1,
            "num_key_value_heads": 4,
            "q_lora_rank": 256,
            "kv_lora_rank": 128,
            "qk_nope_head_dim": 64,
            "qk_rope_head_dim": 64,
            "v_head_dim": 64,
            "num_nextn_predict_layers": 0,
        },
        config_json={
            "rope_scaling": {
                "type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 512,
                "beta_fast": 32,
                "beta_slow": 1,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
            },
            "rope_theta": 10000.0,
            "moe_layer_freq": 1,
            "topk_method": "noaux_tc",
            "scoring_func": "sigmoid",
        },
    ),
    # Its activation has two one-element parameters a layer, and two buffers that checkpoints hold.
    "apertus": Family({"hidden_act": "xielu"}),
    "gpt_oss": Family(
        {"num_local_experts": 4, "num_experts_per_tok": 2}, config_json={"swiglu_limit": 7.0}
    ),
    "qwen2_5_vl": Family(
        {"rope_scaling": {"type": "mrope", "mrope_section": [8, 12, 12]}}, vision=_VISION
    ),
    "qwen3_vl": Family(
        {
            "rope_scaling": {
                "rope_type": "default",
                "mrope_section": [12, 10, 10],
                "mrope_interleaved": True,
            }
        },
        vision={**_VISION, "deepstack_visual_indexes": [0]},
    ),
}


def make_config(family: str = "qwen3", **overrides: Any) -> Any:
    """The `transformers` config of a small model of `family`; `overrides` go to the language model."""
    from transformers import AutoConfig

    known = _FAMILIES[family]
    sizes = {**_DENSE, **known.sizes, **overrides}
    if known.vision:
        return AutoConfig.for_model(family, text_config=sizes, vision_config=known.vision)
    return AutoConfig.for_model(family, **sizes)


def model_class(config: Any) -> type:
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_CAUSAL_LM_MAPPING,
        MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    )

    if _FAMILIES[config.model_type].vision:
        return MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING[type(config)]
    return MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]


def embedding_std(config: Any) -> float:
    return _FAMILIES[config.model_type].embedding_std


def hub_config(config: Any) -> dict[str, Any]:
    """`config.json` as the hub has it."""
    content = {**config.to_dict(), "architectures": [model_class(config).__name__]}
    content["dtype"] = content["torch_dtype"] = "bfloat16"
    return {**content, **_FAMILIES[config.model_type].config_json}


def hub_shapes(config: Any) -> dict[str, tuple[int, ...]]:
    """Name → shape as on the hub: in memory `transformers` 5 renames modules and fuses experts."""
    from transformers.core_model_loading import revert_weight_conversion

    with torch.device("meta"):
        model: Any = model_class(config)(config)
    stored = revert_weight_conversion(model, model.state_dict())
    if model.config.get_text_config().tie_word_embeddings:
        stored.pop("lm_head.weight", None)
    return {name: tuple(tensor.shape) for name, tensor in stored.items()}
