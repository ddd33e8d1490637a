"""Which rows and columns a tensor-parallel rank owns, and which block scales go with them.

Pure integers: no torch, no host. `Span` is half-open and counts rows or columns of the *full*
weight as the trainer sends it.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import QuantizationError


@dataclass(frozen=True)
class Span:
    """`[start, start + size)` along one dimension."""

    start: int
    size: int

    @property
    def stop(self) -> int:
        return self.start + self.size


def owned_span(full_size: int, tp_rank: int, tp_size: int) -> Span:
    """The contiguous part of one dimension that a column- or row-parallel rank owns.

    Raises:
        QuantizationError: the dimension can't be divided by `tp_size`.
    """
    if full_size % tp_size:
        raise QuantizationError(
            "tensor-parallel split",
            f"size {full_size} over tp_size {tp_size}",
            "every rank owns the same number of rows or columns",
            "Use a tp_size that divides it.",
        )
    size = full_size // tp_size
    return Span(tp_rank * size, size)


def owned_kv_span(kv_heads: int, head_dim: int, tp_rank: int, tp_size: int) -> Span:
    """The rows of `k_proj` (or `v_proj`) that a rank owns.

    With fewer KV heads than ranks, `tp_size / kv_heads` neighbouring ranks hold the same head.

    Raises:
        QuantizationError: neither of `kv_heads` and `tp_size` divides the other.
    """
    if tp_size > kv_heads:
        if tp_size % kv_heads:
            raise QuantizationError(
                "KV heads",
                f"{kv_heads} heads over tp_size {tp_size}",
                "one has to divide the other",
                "Use a tp_size that is a multiple of the KV heads.",
            )
        return Span(tp_rank // (tp_size // kv_heads) * head_dim, head_dim)
    heads = owned_span(kv_heads, tp_rank, tp_size)
    return Span(heads.start * head_dim, heads.size * head_dim)


def scale_span(span: Span, block: int, full_size: int, *, name: str = "weight") -> Span:
    """The block scales that belong to a span of rows or columns.

    Args:
        span: rows or columns of the full weight.
        block: `block_n` for rows, `block_k` for columns; 1 for per-channel scales.
        full_size: size of the full weight along this dimension; only its last block may be short.
        name: the tensor's name, for the error.

    Raises:
        QuantizationError: the span starts or ends inside a block. Its scale would have to be
            computed from values that another rank holds, so a scale computed on the full weight
            can't be split; the weight has to be sent unquantized, or per channel.
    """
    if span.start % block or (span.stop % block and span.stop != full_size):
        raise QuantizationError(
            name,
            f"shard [{span.start}, {span.stop}) of {full_size}",
            f"it starts or ends inside a block of {block}, so no block scale belongs to it alone",
            "Send this tensor in BF16 or FP32 and let the engine quantize its own shard.",
        )
    start = span.start // block
    return Span(start, -(-span.stop // block) - start)
