"""Attention as FlashAttention-3 computes it over an FP8 cache: queries and probabilities in e4m3 too.

SGLang's torch attention reads an FP8 cache as BF16, which is what backends with BF16 queries do. Named in
`SGLANG_FP8RL_CPU_ATTENTION` (`ON`), this does what FA3 does instead on the CPU platform. SGLang casts the queries as they
are, without a scale; the kernel multiplies e4m3 by e4m3 into FP32, keeps `exp(s - max) * 2**8` in e4m3 for the
second product (so that it uses e4m3's range), and divides by the sum that it took before that cast.

The kernel's maximum is a running one, over blocks of keys; here it is that of all keys.
"""

from __future__ import annotations

from typing import Any

import torch

from sglang_fp8rl.errors import HostError
from sglang_fp8rl.lab.cpu_platform import ATTENTION_VARIABLE

ON = {ATTENTION_VARIABLE: __name__}  # the environment of a server that has it
FP8 = torch.float8_e4m3fn
_OFFSET = 2.0**8  # of the probabilities


def fp8_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scaling: float,
    mask: torch.Tensor,
) -> torch.Tensor:
    """Attention of the queries of one request.

    Args:
        q: `[queries, heads, head_dim]`, BF16.
        k, v: `[keys, kv_heads, head_dim]`, e4m3.
        mask: bool `[queries, keys]`: what a query may see; at least one key.

    Returns:
        Like `q`.
    """
    share = q.shape[1] // k.shape[1]
    query = q.to(FP8).float().movedim(1, 0)  # [heads, queries, head_dim]
    key, value = (one.float().movedim(1, 0).repeat_interleave(share, 0) for one in (k, v))
    scores = (query @ key.transpose(1, 2) * scaling).masked_fill(~mask, -torch.inf)
    exact = (scores - scores.amax(-1, keepdim=True)).exp() * _OFFSET
    out = exact.to(FP8).float() @ value / exact.sum(-1, keepdim=True)
    return out.movedim(0, 1).to(q.dtype)


def make_backend(runner: Any) -> Any:
    """SGLang's `torch_native` backend, but for caches in e4m3."""
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend

    class Fp8Attention(TorchNativeAttnBackend):
        """Reads the cache request by request, as its base does; another cache as its base does."""

        def _run_sdpa_forward_extend(
            self, query: Any, output: Any, k_cache: Any, v_cache: Any, *where: Any, **options: Any
        ) -> Any:
            if k_cache.dtype is not FP8:
                return super()._run_sdpa_forward_extend(
                    query, output, k_cache, v_cache, *where, **options
                )
            req_to_token, requests, lengths, _prefixes, counts, *rest = where
            slots = _slots(req_to_token, requests, lengths, *rest)
            return _by_request(query, output, (k_cache, v_cache), slots, counts.tolist(), **options)

        def _run_sdpa_forward_decode(
            self, query: Any, output: Any, k_cache: Any, v_cache: Any, *where: Any, **options: Any
        ) -> Any:
            if k_cache.dtype is not FP8:
                return super()._run_sdpa_forward_decode(
                    query, output, k_cache, v_cache, *where, **options
                )
            slots = _slots(*where)
            return _by_request(
                query, output, (k_cache, v_cache), slots, [1] * len(slots), **options
            )

    return Fp8Attention(runner)


def _slots(
    req_to_token: torch.Tensor,
    requests: torch.Tensor,
    lengths: torch.Tensor,
    encoder_lens: torch.Tensor | None = None,
) -> list[torch.Tensor]:
    """The slots of each request's tokens; its queries are the last of them."""
    if encoder_lens is not None:
        raise HostError(
            ATTENTION_VARIABLE,
            "an encoder-decoder model",
            "cross attention is not emulated in FP8",
            f"Leave {ATTENTION_VARIABLE} out.",
        )
    return [
        req_to_token[request, :length]
        for request, length in zip(requests.tolist(), lengths.tolist(), strict=True)
    ]


def _by_request(
    query: torch.Tensor,
    output: torch.Tensor,
    caches: tuple[torch.Tensor, torch.Tensor],
    slots: list[torch.Tensor],
    counts: list[int],
    *,
    scaling: float,
    sliding_window_size: int | None = None,
    **_: Any,
) -> torch.Tensor:
    """Each request's last `count` tokens are its queries."""
    start = 0
    for held, count in zip(slots, counts, strict=True):
        k, v = (cache[held] for cache in caches)
        mask = _seen(len(held), count, sliding_window_size, query.device)
        end = start + count
        output[start:end] = fp8_attention(query[start:end], k, v, scaling, mask)
        start = end
    return output


def _seen(keys: int, queries: int, window: int | None, device: torch.device) -> torch.Tensor:
    at = torch.arange(keys - queries, keys, device=device).unsqueeze(1)
    key = torch.arange(keys, device=device).unsqueeze(0)
    seen = key <= at
    return seen if window is None or window < 0 else seen & (key >= at - window)
