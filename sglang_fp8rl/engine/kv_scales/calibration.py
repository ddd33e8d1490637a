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

from ...config import Options
from ...errors import ConfigError
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


_OPTION = "kv_calibration_tokens"
# Written for it, and in the public domain.
TEXT = """The harbour wakes before the town does. At four in the morning the ice machine starts, and by \
half past there are lights in every boat. Marta counts crates: forty of herring, twelve of cod, and a box \
that nobody ordered. "Leave it," says her brother, "somebody will ask." Nobody asks.

Question: A tank holds 240 litres. One pipe fills it in 6 hours, another empties it in 8. Both are open. \
When is it full? Answer: The first brings 240 / 6 = 40 litres an hour, the second takes 240 / 8 = 30, so \
10 are left, and 240 / 10 = 24 hours. Check: 24 * 40 - 24 * 30 = 960 - 720 = 240.

def longest_run(values):
    best = length = 0
    for before, after in zip(values, values[1:]):
        length = length + 1 if after > before else 0
        best = max(best, length)
    return best + 1 if values else 0

{"id": 7041, "name": "Ostrava", "open": true, "rates": [0.125, -3.5e-4, 1e6], "note": null}

Let f(x) = x^2 - 5x + 6. Then f(x) = (x - 2)(x - 3), so its zeros are x = 2 and x = 3, and as f is a \
parabola that opens upwards its least value lies between them, at x = 5/2, where f(5/2) = -1/4.

Wer früh aufsteht, sieht den Nebel über dem Fluss. Quand il pleut, la route sent la terre. El tren de las \
nueve llega tarde. 今日は風が強い。 Сегодня идёт снег. مرحبا. 12:45, 3/4, $19.99, 50 %, #42, a@b.example

First, write down what is known. Second, say what is asked. Third, look for the step between the two; if \
there is none, cut the question in half and begin again. Wait, that is not yet right: the second half may \
need the first. So number them, and answer them in order. Therefore the result is 128.
"""


def calibration_of(runner: Any, options: Options) -> Calibration:
    """For the model of a `ModelRunner`.

    Raises:
        ConfigError: no tokens to be had, or some that the model does not know.
    """
    from sglang.srt.runtime_context import get_server_args

    size, length = runner.model_config.vocab_size, runner.model_config.context_len
    tokens = options.kv_calibration_tokens or _of_text(get_server_args())
    if max(tokens) >= size or len(tokens) > length:
        raise ConfigError(
            _OPTION,
            f"{len(tokens)} tokens, the largest is {max(tokens)}",
            f"this model has {size} tokens and room for {length} in a sequence",
            "Give ids of this model's tokenizer.",
        )
    return Calibration(runner.model, tokens[:MAX_TOKENS])


def _of_text(args: Any) -> list[int]:
    """By the tokenizer that the server has, or would have without `--skip-tokenizer-init`."""
    from sglang.srt.utils.hf_transformers_utils import get_tokenizer

    path = args.tokenizer_path or args.model_path
    try:
        tokenizer = get_tokenizer(
            path,
            tokenizer_mode=args.tokenizer_mode,
            trust_remote_code=args.trust_remote_code,
            revision=args.revision,
        )
        tokens = list(tokenizer.encode(TEXT))
    except (OSError, ValueError, ImportError) as error:
        raise _no_tokens(path, f"no tokenizer ({type(error).__name__})") from error
    if not tokens:  # what transformers makes of a model's config alone has no vocabulary
        raise _no_tokens(path, "a tokenizer that makes no tokens of the text")
    return tokens[:MAX_TOKENS]


def _no_tokens(path: str, value: str) -> ConfigError:
    return ConfigError(
        f"kv_scales 'calibrated', {path}",
        value,
        "the text to calibrate with has to become tokens",
        f"Put the tokenizer beside the model, or give token ids as {_OPTION}.",
    )
