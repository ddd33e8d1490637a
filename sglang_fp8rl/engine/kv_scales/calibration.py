"""The largest keys and values that a fixed text makes, measured in the engine on the weights it serves.

The model's own layers run once, eagerly, over one sequence. Their attention is computed from the K and V of
that sequence alone, through the seam that SGLang has for this (`ForwardContext` names the attention backend
of a forward pass). So no slot of the cache is taken, nothing in it is read or written, and the numbers don't
depend on the exponents in force or on the cache's dtype; its memory may even be released.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

from .attention_layers import AttentionLayer

MAX_TOKENS = 512


class Calibration:
    """Of one served model.

    Args:
        model: as SGLang built it.
        tokens: ids of one sequence; the same at every server and every update.

    Attributes:
        room: a binade: other text, and later positions, may have larger values.
    """

    room = 2.0

    def __init__(self, model: torch.nn.Module, tokens: Sequence[int]) -> None:
        self._model, self._tokens = model, list(tokens)

    def largest(self, layers: Sequence[AttentionLayer]) -> torch.Tensor:
        """FP64 `[layers, 2]` of this rank's heads. A collective where the model's layers are.

        Keys are measured behind their rotation, as they are stored.
        """
        if not layers:
            return torch.zeros(0, 2, dtype=torch.float64)
        from sglang.srt.model_executor.forward_context import ForwardContext, forward_context

        body: Any = self._model.get_submodule(layers[0].name.split(".layers.")[0])
        batch = _one_sequence(self._tokens, layers[0].input_norm.device)
        attention = _MeasuringAttention()
        with torch.no_grad(), forward_context(ForwardContext(attn_backend=attention)):
            body(batch.input_ids, batch.positions, batch)
        found = torch.stack([attention.found[one.layer_id] for one in layers])
        return found.double().cpu()

    def adopted(self, layers: Sequence[AttentionLayer]) -> None:
        """Nothing is remembered: the next update is measured anew."""

    def as_dict(self) -> dict[str, Any]:
        """For the status section: equal at servers that measure the same."""
        text = ",".join(map(str, self._tokens))
        digest = hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
        return {"tokens": len(self._tokens), "digest": digest}


class _MeasuringAttention:
    """Causal attention of one sequence with itself; what SGLang asks of a backend in such a forward pass.

    Attributes:
        found: by layer, the largest magnitudes of K and of V, NaN if one is: `[2]`, on the device.
        token_to_kv_pool: says that the cache is in FP8, so that no fused kernel writes to it.
    """

    token_to_kv_pool = SimpleNamespace(dtype=torch.float8_e4m3fn)

    def __init__(self) -> None:
        self.found: dict[int, torch.Tensor] = {}

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: Any, *_: Any, **__: Any
    ) -> torch.Tensor:
        """`q` is `[tokens, heads * head_dim]` or `[tokens, heads, head_dim]`; the result as the first."""
        self.found[layer.layer_id] = torch.stack([k.abs().amax(), v.abs().amax()])
        heads = (
            (q, layer.tp_q_head_num, layer.qk_head_dim),
            (k, layer.tp_k_head_num, layer.qk_head_dim),
            (v, layer.tp_v_head_num, layer.v_head_dim),
        )
        query, key, value = (
            one.reshape(1, -1, count, size).transpose(1, 2) for one, count, size in heads
        )
        out = scaled_dot_product_attention(
            query,
            key,
            value,
            is_causal=True,
            scale=layer.scaling,
            enable_gqa=layer.tp_q_head_num != layer.tp_k_head_num,
        )  # [1, heads, tokens, head_dim]
        return out.transpose(1, 2).reshape(len(q), -1)


def _one_sequence(tokens: Sequence[int], device: torch.device) -> Any:
    """A prefill of one request without a prefix."""
    from sglang.srt.model_executor.forward_batch_info import (
        CaptureHiddenMode,
        ForwardBatch,
        ForwardMode,
    )

    count = len(tokens)

    def ints(values: Sequence[int], dtype: torch.dtype = torch.int64) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype, device=device)

    return ForwardBatch(
        forward_mode=ForwardMode.EXTEND,
        batch_size=1,
        input_ids=ints(tokens),
        positions=ints(range(count)),
        req_pool_indices=ints([0]),
        out_cache_loc=ints([0] * count),  # nobody writes there
        seq_lens=ints([count]),
        seq_lens_cpu=torch.tensor([count]),
        seq_lens_sum=count,
        extend_num_tokens=count,
        extend_seq_lens=ints([count], torch.int32),
        extend_prefix_lens=ints([0], torch.int32),
        extend_start_loc=ints([0], torch.int32),
        extend_seq_lens_cpu=[count],
        extend_prefix_lens_cpu=[0],
        capture_hidden_mode=CaptureHiddenMode.NULL,
    )
