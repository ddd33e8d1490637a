"""The largest keys and values that a fixed text makes, measured in the engine on the weights it serves.

The model's own layers run once, eagerly, over one sequence, and attend to its own K and V, through the seam that
SGLang has for this (`ForwardContext` names the attention backend of a forward pass). So no slot of the cache is
taken, nothing in it is read or written, and its memory may even be released.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from types import SimpleNamespace
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

from ...config import MAX_CALIBRATION_TOKENS, Options
from ...errors import ConfigError
from .attention_layers import AttentionLayer


def largest_of_text(
    model: torch.nn.Module, tokens: Sequence[int], layers: Sequence[AttentionLayer]
) -> torch.Tensor:
    """FP64 `[layers, 2]` of this rank's heads, of one sequence. A collective where the model's layers are.

    Keys are measured behind their rotation, as they are stored.
    """
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode
    from sglang.srt.model_executor.forward_context import ForwardContext, forward_context

    count, ids = len(tokens), torch.tensor(tokens, device=layers[0].input_norm.device)
    # A prefill of one request without a prefix; what only an attention backend would read is left out.
    batch = ForwardBatch(
        forward_mode=ForwardMode.EXTEND,
        batch_size=1,
        input_ids=ids,
        positions=torch.arange(count, device=ids.device),
        req_pool_indices=ids.new_zeros(1),
        out_cache_loc=torch.zeros_like(ids),  # nobody writes there
        seq_lens=ids.new_tensor([count]),
        seq_lens_sum=count,
        extend_num_tokens=count,
    )
    body: Any = model.get_submodule(layers[0].name.split(".layers.")[0])
    attention = _MeasuringAttention()
    with torch.no_grad(), forward_context(ForwardContext(attn_backend=attention)):
        body(batch.input_ids, batch.positions, batch)
    return torch.stack([attention.found[one.layer_id] for one in layers]).double().cpu()


@dataclass
class _MeasuringAttention:
    """Causal attention of one sequence with itself; what SGLang asks of a backend in such a forward pass.

    Attributes:
        found: by layer, the largest magnitudes of K and of V, NaN if one is: `[2]`, on the device.
        token_to_kv_pool: says that the cache is in FP8, so that no fused kernel writes to it.
    """

    found: dict[int, torch.Tensor] = field(default_factory=dict)
    token_to_kv_pool = SimpleNamespace(dtype=torch.float8_e4m3fn)

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: Any, *_: Any, **__: Any
    ) -> torch.Tensor:
        """`q` is `[tokens, heads * head_dim]` or `[tokens, heads, head_dim]`; the result as the first."""
        self.found[layer.layer_id] = torch.stack([k.abs().amax(), v.abs().amax()])
        query, key = (
            one.reshape(1, len(one), -1, layer.qk_head_dim).transpose(1, 2) for one in (q, k)
        )
        value = v.reshape(1, len(v), -1, layer.v_head_dim).transpose(1, 2)
        out = scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=layer.scaling, enable_gqa=True
        )  # [1, heads, tokens, head_dim]
        return out.transpose(1, 2).reshape(len(q), -1)


def tokens_for(runner: Any, options: Options) -> list[int]:
    """What the model of a `ModelRunner` is calibrated with: the same at every server and every update.

    Raises:
        ConfigError: no tokens to be had, or some that the model does not know.
    """
    from sglang.srt.runtime_context import get_server_args

    size, length = runner.model_config.vocab_size, runner.model_config.context_len
    tokens = list(options.kv_calibration_tokens or _of_text(get_server_args()))
    del tokens[MAX_CALIBRATION_TOKENS:]  # of the text
    if max(tokens) >= size or len(tokens) > length:
        raise ConfigError(
            "kv_calibration_tokens",
            f"{len(tokens)} tokens, the largest is {max(tokens)}",
            f"this model has {size} tokens and room for {length} in a sequence",
            "Give ids of this model's tokenizer.",
        )
    return tokens


def _of_text(args: Any) -> list[int]:
    """By the tokenizer that the server has, or would have without `--skip-tokenizer-init`."""
    from sglang.srt.utils.hf_transformers_utils import get_tokenizer

    path = args.tokenizer_path or args.model_path
    # Written for it, and in the public domain.
    text = files(__package__).joinpath("calibration_text.txt").read_text("utf-8")
    try:
        tokenizer = get_tokenizer(
            path,
            tokenizer_mode=args.tokenizer_mode,
            trust_remote_code=args.trust_remote_code,
            revision=args.revision,
        )
        tokens, value = list(tokenizer.encode(text)), "a tokenizer that makes no tokens of the text"
    except (OSError, ValueError, ImportError) as error:
        tokens, value = [], f"no tokenizer ({type(error).__name__}: {error})"
    if not tokens:  # what transformers makes of a model's config alone has no vocabulary
        raise ConfigError(
            f"kv_scales 'calibrated', {path}",
            value,
            "the text to calibrate with has to become tokens",
            "Put the tokenizer beside the model, or give token ids as kv_calibration_tokens.",
        )
    return tokens
