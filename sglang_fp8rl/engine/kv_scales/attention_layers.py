"""The attention layers of a model, and the exponents that are folded into their weights.

A fold is right only where the forward pass is known: what stands before the projections, what between
them and the cache, and what reads the output. So layers are served by the class that was looked at and
tested, and every other one is refused by name.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from ...errors import ConfigError
from ...numerics.kv_bounds import Rotation, Rows, multiply_by_powers, normed, projected, rotated
from ..modules.method import format_of

# Decoder layer to its attention: RMSNorm, projections, norms of Q and K or none, rotary, cache, o_proj.
_SERVED = {
    "sglang.srt.models.llama.LlamaDecoderLayer": "sglang.srt.models.llama.LlamaAttention",
    "sglang.srt.models.qwen2.Qwen2DecoderLayer": "sglang.srt.models.qwen2.Qwen2Attention",
    "sglang.srt.models.mixtral.MixtralDecoderLayer": "sglang.srt.models.mixtral.MixtralAttention",
    "sglang.srt.models.qwen3.Qwen3DecoderLayer": "sglang.srt.models.qwen3.Qwen3Attention",
    "sglang.srt.models.qwen3_moe.Qwen3MoeDecoderLayer": "sglang.srt.models.qwen3_moe.Qwen3MoeAttention",
}
_NORM = "sglang.srt.layers.layernorm.RMSNorm"

Parts = tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class AttentionLayer:
    """One layer with a KV cache, and the views of its weights that a fold multiplies.

    Attributes:
        name: of the attention module.
        layer_id: its number in the KV pool.
        down: of keys and of values, what is multiplied by `2**-e`.
        up: of queries and of the output, what is multiplied by `2**e`.
        key_norm: the weight of the norm behind the projection, if there is one.
    """

    name: str
    layer_id: int
    down: tuple[Parts, Parts]
    up: tuple[Parts, Parts]
    input_norm: torch.Tensor
    key_norm: torch.Tensor | None
    key_rows: Rows
    value_rows: Rows
    rotation: Rotation

    def bounds(self) -> torch.Tensor:
        """No key and no value that is stored is larger than this: FP64 `[2]`, on the weights' device."""
        if self.key_norm is not None:
            of_keys = normed(self.key_norm, self.rotation)
        else:
            of_keys = rotated(projected(self.key_rows, self.input_norm), self.rotation).amax()
        return torch.stack([of_keys, projected(self.value_rows, self.input_norm).amax()])


class Fold:
    """Of one served model.

    Attributes:
        exponents: int64 `[layers, 2]`, keys and values: `x * 2**-e` is stored. Zero while unfolded.
    """

    def __init__(self, layers: Sequence[AttentionLayer] = ()) -> None:
        self.layers = layers
        self.exponents = torch.zeros(len(layers), 2, dtype=torch.int64)

    def change(self, exponents: torch.Tensor) -> None:
        """Fold these instead. No kernel may be running on the weights meanwhile: the device is waited for."""
        self._multiply(-self.exponents)
        self._multiply(exponents)
        self.exponents = exponents

    @contextmanager
    def unfolded(self) -> Iterator[None]:
        """The weights are as they were loaded in here; folded again afterwards, whatever happens."""
        before = self.exponents
        try:
            self.change(torch.zeros_like(before))
            yield
        finally:
            self.change(before)

    def _multiply(self, exponents: torch.Tensor) -> None:
        if not exponents.any():
            return
        tensors: list[torch.Tensor] = []
        powers: list[int] = []
        for layer, sides in zip(self.layers, exponents.tolist(), strict=True):
            for down, up, exponent in zip(layer.down, layer.up, sides, strict=True):
                tensors += (*down, *up)
                powers += [-exponent] * len(down) + [exponent] * len(up)
        synchronize = torch.get_device_module(tensors[0].device).synchronize
        synchronize()
        multiply_by_powers(tensors, powers)
        synchronize()


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
    norms = [decoder.input_layernorm]
    if getattr(attention, "k_norm", None) is not None:
        norms += [attention.q_norm, attention.k_norm]
    for norm in norms:
        if _path(norm) != _NORM:
            raise refused(name, _path(norm), "a fold needs a norm that multiplies by its weight")
    input_norm, *head_norms = (norm.weight.data for norm in norms)
    if input_norm.dtype is not torch.bfloat16:
        rule = "powers of two commute with BF16's rounding, and FP32 scales have its exponents"
        raise refused("--dtype", str(input_norm.dtype), rule)
    qkv, q, kv = attention.qkv_proj, attention.q_size, attention.kv_size
    queries, keys, values = (_rows(name, qkv, *part) for part in ((0, q), (q, kv), (q + kv, kv)))
    output = _rows(name, attention.o_proj, 0, attention.o_proj.weight.shape[0])
    of_queries, of_keys = [(one,) for one in head_norms] or (_parts(queries), _parts(keys))
    return AttentionLayer(
        name,
        attention.attn.layer_id,
        down=(of_keys, _parts(values)),
        up=(of_queries, _parts(output)[:1]),  # what its bias adds is as large as before
        input_norm=input_norm,
        key_norm=head_norms[1] if head_norms else None,
        key_rows=keys,
        value_rows=values,
        rotation=_rotation(name, attention),
    )


def _rows(name: str, linear: Any, start: int, size: int) -> Rows:
    """These output rows of a linear layer, as views; refused where they share a scale with others."""
    scales, share, end = None, 1, start + size
    if (held := format_of(linear)) is not None:
        scales = getattr(linear, held.scale_name("weight")).data
        share, _ = held.grid(linear.weight.shape).block
    if start % share or (size % share and end != linear.weight.shape[0]):
        raise refused(name, f"rows {start} to {end}", f"its parts share a block of {share} rows")
    bias = getattr(linear, "bias", None)
    return Rows(
        linear.weight.data[start:end],
        None if scales is None else scales[start // share : -(-end // share)],
        None if bias is None else bias.data[start:end],
    )


def _parts(rows: Rows) -> Parts:
    """What a factor of the output is folded into."""
    held = rows.weight if rows.scales is None else rows.scales
    return (held,) if rows.bias is None else (held, rows.bias)


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
