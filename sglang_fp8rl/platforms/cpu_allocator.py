"""KV-slot allocator for SGLang before 0.5.22, whose paged allocator needs Triton."""

from __future__ import annotations

from typing import Any

from sglang.srt.mem_cache.allocator.token import TokenToKVPoolAllocator

from sglang_fp8rl.errors import HostError


class TokenAllocator(TokenToKVPoolAllocator):
    """SGLang's per-token allocator, under the paged allocator's signature."""

    def __init__(self, size: int, *, page_size: int, **kwargs: Any) -> None:
        if page_size != 1:
            raise HostError(
                "--page-size",
                str(page_size),
                "on this SGLang version the CPU platform serves pages of one token only",
                "Leave --page-size out, or use SGLang 0.5.22 or later.",
            )
        super().__init__(size, **kwargs)
