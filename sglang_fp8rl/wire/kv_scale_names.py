"""Names under which scales of an FP8 KV cache travel, beside the weights.

NeMo-RL sends `….self_attn.k_scale`, `….self_attn.v_scale` and `….self_attn.attn.q_scale`, FP32 of shape `[1]`;
checkpoints of compressed-tensors have the first two. vLLM and SGLang call their own parameters
`….attn.k_scale`, and ModelOpt writes `….k_proj.k_scale`. What is stored is the value over its scale.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

KEYS, VALUES = "k", "v"
_NAME = re.compile(
    r"(?P<attention>.+?)(?:\.attn|\.qkv_proj|\.(?P<of>[qkv])_proj)?\.(?P<side>[qkv]|prob)_scale"
)


@dataclass(frozen=True)
class KvScaleName:
    """What a name of such a scale says.

    Attributes:
        attention: the module it belongs to, as the sender calls it (`model.layers.0.self_attn`).
        side: `k`, `v`, `q` or `prob`.
    """

    attention: str
    side: str


def kv_scale_name(name: str) -> KvScaleName | None:
    """None for every other name; in particular for scales of weights and of activations."""
    if not name.endswith("_scale"):
        return None
    found = _NAME.fullmatch(name)
    if found is None or found["of"] not in (None, found["side"]):
        return None
    return KvScaleName(found["attention"], found["side"])
