"""The attention layers of a model: what can be folded into which of their weights.

A fold is right only where the forward pass is known: what stands before the projections, what between
them and the cache, and what reads the output. So layers are served by the class that was looked at and
tested, and every other one is refused by name.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ...errors import ConfigError
from ...numerics.kv_bounds import Rotation, Rows, normed, projected, rotated
from ...numerics.powers_of_two import EXACT_DTYPES
from ...scheme import Granularity
from ..modules.linear import Fp8BlockwiseOnlineLinearMethod

# Decoder layer to its attention: RMSNorm, projections, norms of Q and K or none, rotary, cache, o_proj.
_SERVED = {
    "sglang.srt.models.llama.LlamaDecoderLayer": "sglang.srt.models.llama.LlamaAttention",
    "sglang.srt.models.qwen2.Qwen2DecoderLayer": "sglang.srt.models.qwen2.Qwen2Attention",
    "sglang.srt.models.mixtral.MixtralDecoderLayer": "sglang.srt.models.mixtral.MixtralAttention",
    "sglang.srt.models.qwen3.Qwen3DecoderLayer": "sglang.srt.models.qwen3.Qwen3Attention",
    "sglang.srt.models.qwen3_moe.Qwen3MoeDecoderLayer": "sglang.srt.models.qwen3_moe.Qwen3MoeAttention",
}
_NORM = "sglang.srt.layers.layernorm.RMSNorm"
_BLOCK = 128


@dataclass(frozen=True)
class AttentionLayer:
    """One layer with a KV cache, and the views of its weights that a fold multiplies.

    Attributes:
        name: of the attention module.
        layer_id: its number in the KV pool.
        keys_down, queries_up: multiplied by `2**-a` and `2**a`.
        values_down, output_up: multiplied by `2**-b` and `2**b`.
    """

    name: str
    layer_id: int
    keys_down: tuple[torch.Tensor, ...]
    queries_up: tuple[torch.Tensor, ...]
    values_down: tuple[torch.Tensor, ...]
    output_up: tuple[torch.Tensor, ...]
    input_norm: torch.Tensor
    key_norm: torch.Tensor | None
    key_rows: Rows
    value_rows: Rows
    rotation: Rotation

    def key_bound(self) -> torch.Tensor:
        """Nothing larger than this is ever stored as a key: FP64 scalar, on the weights' device."""
        if self.key_norm is not None:
            return normed(self.key_norm, self.rotation)
        return rotated(projected(self.key_rows, self.input_norm), self.rotation).amax()

    def value_bound(self) -> torch.Tensor:
        """As `key_bound`, of values."""
        return projected(self.value_rows, self.input_norm).amax()


def attention_layers(model: torch.nn.Module) -> list[AttentionLayer]:
    """Every layer of the model that has a KV cache, in the order of their numbers.

    Raises:
        ConfigError: one that can't be folded; names it and says why.
    """
    from sglang.srt.layers.radix_attention import RadixAttention

    modules = dict(model.named_modules())
    found = []
    for name, module in modules.items():
        if isinstance(module, RadixAttention):
            attention = name.rpartition(".")[0]
            decoder = modules[attention.rpartition(".")[0]]
            found.append(_layer(attention, modules[attention], decoder))
    return sorted(found, key=lambda layer: layer.layer_id)


def _layer(name: str, attention: Any, decoder: Any) -> AttentionLayer:
    kind = _path(decoder)
    if _SERVED.get(kind) != _path(attention):
        raise refused(name, f"{_path(attention)} in {kind}", "no test shows this class served")
    key_norm = getattr(attention, "k_norm", None)
    for norm in (decoder.input_layernorm, key_norm, getattr(attention, "q_norm", None)):
        if norm is not None and _path(norm) != _NORM:
            raise refused(name, _path(norm), "a fold needs a norm that multiplies by its weight")
    qkv, q, kv = attention.qkv_proj, attention.q_size, attention.kv_size
    q_parts, k_parts, v_parts = (
        _parts(name, qkv, start, size) for start, size in ((0, q), (q, kv), (q + kv, kv))
    )
    if key_norm is not None:
        q_parts, k_parts = (attention.q_norm.weight.data,), (key_norm.weight.data,)
    out = attention.o_proj
    layer = AttentionLayer(
        name,
        attention.attn.layer_id,
        keys_down=k_parts,
        queries_up=q_parts,
        values_down=v_parts,
        output_up=_parts(name, out, 0, out.weight.shape[0], with_bias=False),
        input_norm=decoder.input_layernorm.weight.data,
        key_norm=None if key_norm is None else key_norm.weight.data,
        key_rows=_rows(qkv, q, kv),
        value_rows=_rows(qkv, q + kv, kv),
        rotation=_rotation(name, attention),
    )
    for one in (*layer.keys_down, *layer.queries_up, *layer.values_down, *layer.output_up):
        if one.dtype not in EXACT_DTYPES:
            raise refused(
                name, f"weights in {one.dtype}", "powers of two are exact in BF16 and FP32"
            )
    return layer


def _scale_of(linear: Any) -> tuple[torch.Tensor | None, int]:
    """What multiplies the codes of a layer, and how many rows share one; None in high precision."""
    method = linear.quant_method
    if not isinstance(method, Fp8BlockwiseOnlineLinearMethod) or method.fp8rl_scheme is None:
        return None, 1
    match method.fp8rl_scheme.granularity:
        case Granularity.BLOCKWISE:
            return linear.weight_scale_inv.data, _BLOCK
        case Granularity.PER_CHANNEL:
            return linear.weight_scale.data, 1
    return None, 1


def _parts(
    name: str, linear: Any, start: int, size: int, with_bias: bool = True
) -> tuple[torch.Tensor, ...]:
    """Views that scale these output rows of a linear layer."""
    scale, share = _scale_of(linear)
    if start % share or (size % share and start + size != linear.weight.shape[0]):
        raise refused(
            name, f"rows {start} to {start + size}", "its parts share a block of 128 rows"
        )
    held = linear.weight.data if scale is None else scale
    end = -(-(start + size) // share)
    bias = getattr(linear, "bias", None)
    parts = (held[start // share : end],)
    return parts if bias is None or not with_bias else (*parts, bias.data[start : start + size])


def _rows(linear: Any, start: int, size: int) -> Rows:
    scale, share = _scale_of(linear)
    bias = getattr(linear, "bias", None)
    return Rows(
        linear.weight.data[start : start + size],
        None if scale is None else scale[start // share : -(-(start + size) // share)],
        None if bias is None else bias.data[start : start + size],
    )


def _rotation(name: str, attention: Any) -> Rotation:
    rotary = attention.rotary_emb
    cache = getattr(rotary, "cos_sin_cache", None)
    size = getattr(rotary, "rotary_dim", None)
    if cache is None or cache.shape[-1] != size or size > attention.head_dim:
        raise refused(name, _path(rotary), "no table of cosines and sines that bounds its rotation")
    pairs = cache.detach().double().view(-1, 2, size // 2)  # cosines, then sines
    # A plan is made of a model without memory, whose bounds nobody asks for.
    gain = 1.0 if pairs.is_meta else max(1.0, float(pairs.square().sum(1).amax().sqrt()))
    return Rotation(attention.head_dim, size, bool(rotary.is_neox_style), gain)


def _path(module: Any) -> str:
    return f"{type(module).__module__}.{type(module).__qualname__}"


def refused(subject: str, value: str, rule: str) -> ConfigError:
    """Why an FP8 KV cache is not served with scales."""
    return ConfigError(
        subject,
        value,
        f"kv_scales can't be folded here: {rule}",
        "Serve with a BF16 KV cache, or set kv_scales to 'unit' (SGLang's own FP8 cache, without scales).",
    )
