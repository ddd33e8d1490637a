"""Functions that tests of the FP8 KV cache run inside a scheduler (see `engine_host`)."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import torch

from support.engine.commands import digests, model_of
from support.engine.generation import generate, step, submit

FP8_CACHE = ("--kv-cache-dtype", "fp8_e4m3")


def kv_of(scheduler: Any) -> Any:
    """None where the cache is not scaled."""
    from sglang_fp8rl.engine.kv_scales.extension import KvScaling

    extensions = model_of(scheduler).fp8rl_refit.extensions
    return next((one for one in extensions if isinstance(one, KvScaling)), None)


def fold_of(scheduler: Any) -> Any:
    """Of a server that scales nothing, one that only tests change."""
    from sglang_fp8rl.engine.extension import Extension
    from sglang_fp8rl.engine.kv_scales.attention_layers import Fold, attention_layers

    class Folded(Extension):
        def __init__(self, refit: Any) -> None:
            super().__init__(refit)
            self.fold = Fold(attention_layers(refit.model))

        def unfolded(self) -> Any:
            return self.fold.unfolded()

    refit = model_of(scheduler).fp8rl_refit
    found = next((one.fold for one in refit.extensions if hasattr(one, "fold")), None)
    if found is None:
        refit.extensions.append(Folded(refit))
        found = refit.extensions[-1].fold
    return found


def fold_at_random(scheduler: Any, seed: int) -> list[tuple[int, int]]:
    """Fold exponents that no rule would choose; the cache's dtype does not matter."""
    draw = random.Random(seed)
    layers = fold_of(scheduler).layers
    fold(
        scheduler,
        [[draw.choice([-1, 1]) * draw.randint(1, 12) for _ in range(2)] for _ in layers],
    )
    return exponents(scheduler)


def fold(scheduler: Any, powers: list[Any]) -> None:
    fold_of(scheduler).change(torch.tensor(powers))
    model_of(scheduler).fp8rl_refit.derived.end_of_update()


def unfold(scheduler: Any) -> None:
    fold_of(scheduler).change(torch.zeros_like(fold_of(scheduler).exponents))
    refit, scaling = model_of(scheduler).fp8rl_refit, kv_of(scheduler)
    if scaling is None:
        refit.extensions.pop()  # the engine is lent to other tests


def exponents(scheduler: Any) -> list[tuple[int, int]]:
    return [tuple(one) for one in fold_of(scheduler).exponents.tolist()]


def unfolded_digests(scheduler: Any) -> dict[str, str]:
    with fold_of(scheduler).unfolded():
        return digests(scheduler)


def generate_cached(scheduler: Any, prompt: list[int], new_tokens: int) -> tuple[Any, int]:
    """As `generate`, and how many tokens of the prompt were found in the prefix cache."""
    hits: list[int] = []
    original = type(scheduler).run_batch

    def run_batch(self: Any, batch: Any, *args: Any, **kw: Any) -> Any:
        hits.extend(getattr(batch, "prefix_lens", None) or [])
        return original(self, batch, *args, **kw)

    type(scheduler).run_batch = run_batch
    try:
        said = generate(scheduler, prompt, new_tokens, may_hit=True)
    finally:
        type(scheduler).run_batch = original
    return said, max(hits, default=0)


def pool_codes(scheduler: Any) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Codes of keys and of values, layer by layer, as bytes; the cache's own memory."""
    pool = scheduler.tp_worker.model_runner.token_to_kv_pool
    numbers = range(scheduler.model_config.num_hidden_layers)
    return [
        (
            pool.get_key_buffer(number).view(torch.uint8),
            pool.get_value_buffer(number).view(torch.uint8),
        )
        for number in numbers
    ]


def poison(scheduler: Any) -> None:
    """Every code that is in the cache becomes NaN."""
    for pair in pool_codes(scheduler):
        for codes in pair:
            codes.fill_(0x7F)


def clear_pool(scheduler: Any) -> None:
    for pair in pool_codes(scheduler):
        for codes in pair:
            codes.zero_()


def stored_rows(scheduler: Any) -> list[tuple[Counter, Counter]]:
    """The rows in the cache as multisets: which slot a token gets differs between runs."""
    return [(_rows(keys), _rows(values)) for keys, values in pool_codes(scheduler)]


def _rows(codes: torch.Tensor) -> Counter:
    flat = codes.reshape(len(codes), -1)
    return Counter(row.numpy().tobytes() for row in flat[flat.any(1)])


def saturated(scheduler: Any) -> int:
    """Codes at the largest magnitude of e4m3, or NaN."""
    return sum(int(((c & 0x7F) >= 0x7E).sum()) for pair in pool_codes(scheduler) for c in pair)


def scale_around_attention(scheduler: Any, powers: list[tuple[int, int]]) -> None:
    """The reference: scale what goes into each attention and what comes out, not the weights."""
    from sglang.srt.layers.radix_attention import RadixAttention

    for module in model_of(scheduler).modules():
        if isinstance(module, RadixAttention):
            a, b = powers[module.layer_id]

            def forward(
                q: Any, k: Any, v: Any, *args: Any, module=module, a=a, b=b, **kw: Any
            ) -> Any:
                scaled = q * 2.0**a, k * 2.0**-a, v * 2.0**-b
                return type(module).forward(module, *scaled, *args, **kw) * 2.0**b

            module.forward = forward


def start_request(scheduler: Any, prompt: list[int]) -> None:
    """A request that has its first token and wants more."""
    submit(scheduler, prompt, new_tokens=8)
    step(scheduler)


def flush(scheduler: Any) -> bool:
    return scheduler.flush_cache()


def weights_by_name(scheduler: Any, name: str) -> Any:
    from sglang.srt.managers.io_struct import GetWeightsByNameReqInput

    request = GetWeightsByNameReqInput(name=name, truncate_size=10_000)
    return scheduler.weight_updater.get_weights_by_name(request).parameter


def _nothing(device: object = None) -> None:
    """Instead of a synchronization."""


def checksums(scheduler: Any) -> Any:
    from sglang.srt.managers.io_struct import CheckWeightsReqInput

    synchronize = torch.cuda.synchronize
    torch.cuda.synchronize = _nothing  # SGLang 0.5.16 calls it whatever the device
    try:
        result = scheduler.weight_updater.check_weights(CheckWeightsReqInput(action="checksum"))
    finally:
        torch.cuda.synchronize = synchronize
    assert result.success, result.message
    return str(result.payload)


def adversarial_codes(scheduler: Any) -> list[tuple[float, float, int]]:
    """What the layers make of inputs that are aligned with their own weights.

    Returns:
        Per layer the largest magnitude of a key and of a value before the cast, and how many numbers
        e4m3 has no code for.
    """
    from sglang_fp8rl.numerics import dequantize

    found = []
    model = model_of(scheduler)
    for layer in fold_of(scheduler).layers:
        decoder = model.get_submodule(layer.name.rpartition(".")[0])
        attention: Any = model.get_submodule(layer.name)
        gain = layer.input_norm.double()
        hidden = []
        for rows in (layer.key_rows, layer.value_rows):
            held = dequantize(rows.weight, rows.scales, dtype=torch.float32).double() * gain
            hidden += [held, held.sign() / gain]
        with torch.no_grad():
            x = decoder.input_layernorm(torch.cat(hidden).to(torch.bfloat16) * 64)
            qkv = attention.qkv_proj(x)[0]
            q, k, v = qkv.split([attention.q_size, attention.kv_size, attention.kv_size], dim=-1)
            if layer.key_norm is not None:
                # One channel alone is what a norm over a head lets through at its largest.
                alone = torch.eye(attention.head_dim, dtype=k.dtype) * 1e4
                k = torch.cat([k.reshape(-1, attention.head_dim), alone])
                k = attention.k_norm(k).view(-1, attention.head_dim)
                k = k[: len(k) // attention.num_kv_heads * attention.num_kv_heads]
                k = k.reshape(-1, attention.kv_size)
                q = q.new_zeros(len(k), attention.q_size)
            positions = torch.arange(len(k)) % 97
            _, k = attention.rotary_emb(positions, q, k)
        lost = sum(int((~(one.abs() <= 448)).sum()) for one in (k, v))
        found.append((float(k.abs().max()), float(v.abs().max()), lost))
    return found
