"""A config class made small: every kind of layer once, with sizes that fit in a few MB."""

from __future__ import annotations

import re
from typing import Any

from .layers import LEAST as LAYERS
from .layers import Layers
from .overrides import DEFAULTS, ROUTING, UNKNOWN

HIDDEN, HEADS, KV_HEADS, EXPERTS, VOCABULARY = 256, 4, 2, 4, 512

# Keys, as whole words, to small sizes: the first that matches. All parts of a model get the same width, so
# that a projector between two fits both.
_SIZES: tuple[tuple[str, int], ...] = (
    (r"(.*_)?vocab_size(_.*)?|num_embeddings|padded_vocab_size", VOCABULARY),
    (
        r"(.*_)?num_(hidden_)?layers|n_layers?|num_layer|depth|(en|de)coder_layers|num_blocks|layers",
        LAYERS,
    ),
    (
        r"num_key_value_heads|num_kv_heads|n_kv_heads|multi_query_group_num|num_key_value_groups",
        KV_HEADS,
    ),
    (
        r"(.*_)?num_(attention_)?heads|n_heads?|(en|de)coder_attention_heads|num_attention_heads",
        HEADS,
    ),
    (r"num_experts_per_tok(en)?|moe_topk?|moe_top_k|top_k_experts|moe_k|experts_top_k", 2),
    (
        r"(n_routed|num_local|num|n|moe_num)_experts|num_routed_experts|moe_num_experts|ffn_num_experts",
        EXPERTS,
    ),
    (
        r"n_group|topk_group|num_expert_groups?|n_shared_experts|num_shared_experts|moe_num_shared_experts",
        1,
    ),
    (
        r"(.*_)?(intermediate|ffn|mlp|ff|feed_forward)_(size|dim|hidden_size)|.*_ffn_dim|n_inner|d_ff|mlp_hidden_size",
        2 * HIDDEN,
    ),
    (r"q_lora_rank|kv_lora_rank|o_lora_rank|lora_rank", 128),
    (r"qk_head_dim|index_head_dim|sparse_index_dim", 128),
    (r"linear_num_key_heads", 2),
    (r"linear_num_value_heads", 4),
    (
        r"(qk_nope|qk_rope|v|global|attention|local|swa|indexer)?_?head_dim|kv_channels|d_kv|swa_v_head_dim",
        64,
    ),
    (
        r"(.*_)?(hidden|embed|embedding|projection|output|out_hidden|text_hidden|model|n|d)_?(size|dim|dims|embd|model)|dim|width|hidden_size|n_embd|d_model",
        HIDDEN,
    ),
    (
        r"max_position_embeddings|max_sequence_length|n_positions|seq_length|max_seq_len|n_ctx|max_seq_length",
        1024,
    ),
)
_COMPILED = [(re.compile(pattern), size) for pattern, size in _SIZES]
_FLAG = re.compile(r"(use|is|has|enable|tie|with|add|apply)_.*|.*_bias|.*_norm")
_TOKEN = re.compile(r".*(_token_id|_token_ids|_token_index|_token|_id)s?")


def shrink(config: dict[str, Any], layers: Layers | None = None) -> dict[str, Any]:
    """`config.to_dict()` of a config class's defaults, small; its parts too.

    Args:
        layers: that are kept, of the part around it.
    """
    layers = Layers.of(config) or layers
    return {key: _shrunk(key, value, layers) for key, value in config.items()}


def _shrunk(key: Any, value: Any, layers: Layers | None) -> Any:
    if value is None:
        return DEFAULTS[key] if key in ROUTING else None
    if type(key) is str and layers is not None:
        if layers.is_count(key, value):
            return len(layers.kept)
        if layers.describes(key, value):
            value = layers.small(key, value)
            if isinstance(value, list):
                return [_small_number(key, one) for one in value]
            return shrink(value, layers) if isinstance(value, dict) else value
    if isinstance(value, dict):
        return shrink(value, layers)
    if isinstance(value, list):
        return [shrink(one) if isinstance(one, dict) else one for one in value]
    return _small_number(key, value)


def _small_number(key: Any, value: Any) -> Any:
    if type(value) is not int or type(key) is not str:
        return value
    if _TOKEN.fullmatch(key):
        return min(value, VOCABULARY - 1)
    size = _size_of(key)
    if size is None:
        return value
    return min(value, size) if size <= LAYERS or value <= 0 else size


def _size_of(key: str) -> int | None:
    return next((size for pattern, size in _COMPILED if pattern.fullmatch(key)), None)


def missing(key: str) -> Any:
    """A value for a key that a model reads, and that its config class does not have: the hub's files do."""
    if key in DEFAULTS:
        return DEFAULTS[key]
    if key.endswith("_config"):
        return dict(UNKNOWN)
    size = _size_of(key)
    return False if size is None and _FLAG.fullmatch(key) else size
