"""KV slots for SGLang before 0.5.22: its paged allocator needs Triton, its MLA pool other arguments."""

from __future__ import annotations

from typing import Any

from sglang.srt.mem_cache.allocator.token import TokenToKVPoolAllocator
from sglang.srt.mem_cache.memory_pool import MLATokenToKVPool

from ...errors import HostError

_WHERE = "on this SGLang version the CPU platform serves"


class TokenAllocator(TokenToKVPoolAllocator):
    """SGLang's per-token allocator, under the paged allocator's signature."""

    def __init__(self, size: int, *, page_size: int, **kwargs: Any) -> None:
        if page_size != 1:
            rule, remedy = (
                f"{_WHERE} pages of one token only",
                "Leave it out, or use 0.5.22 or later.",
            )
            raise HostError("--page-size", str(page_size), rule, remedy)
        super().__init__(size, **kwargs)


class LatentPool(MLATokenToKVPool):
    """SGLang's pool of MLA's latent keys, under the signature it is asked for out of tree."""

    def __init__(self, size: int, *, index_head_dim: int | None = None, **kwargs: Any) -> None:
        if index_head_dim is not None:
            rule = f"{_WHERE} MLA without sparse attention only"
            raise HostError("index_head_dim", str(index_head_dim), rule, "Use 0.5.22 or later.")
        super().__init__(size, **kwargs)
