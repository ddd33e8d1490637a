"""Copy into a parameter that stays in high precision: rows that are not finite keep what they had."""

from __future__ import annotations

import torch

# Of a source whose rows are checked and copied at a time, so that no temporary grows with it.
_CHUNK_ELEMENTS = 4 * 1024 * 1024


def copy_finite_into(source: torch.Tensor, destination: torch.Tensor) -> torch.Tensor:
    """`destination.copy_(source)` row by row, leaving out rows that would hold a NaN or Inf.

    Args:
        source: any floating-point dtype, any strides; its rows are along the last dimension.
        destination: of the same shape; rounded to nearest even where it has fewer bits.

    Returns:
        bool [rows] on the source's device: True where a row is not finite and was not written.
        Nothing here waits for a GPU.
    """
    rows, outs = as_matrix(source), as_matrix(destination)
    if outs is None or rows is None:
        # Not a matrix in memory: whole or not at all.
        rounded = source.to(destination.dtype)
        bad = ~torch.isfinite(rounded).all().reshape(1)
        destination.copy_(torch.where(bad, destination, rounded))
        return bad
    flags = []
    step = max(1, _CHUNK_ELEMENTS // max(1, rows.shape[1]))
    for start in range(0, rows.shape[0], step):
        chunk, out = rows[start : start + step], outs[start : start + step]
        # The extremes see everything: NaN spreads, Inf is one, and what rounds to Inf is the largest.
        low, high = (extreme.to(out.dtype) for extreme in torch.aminmax(chunk, dim=1))
        bad = ~(torch.isfinite(low) & torch.isfinite(high))
        flags.append(bad)
        if chunk.device.type == "cpu" and not bool(bad.any()):
            out.copy_(chunk)
        else:
            out.copy_(torch.where(bad.unsqueeze(1), out, chunk.to(out.dtype)))
    return torch.cat(flags) if flags else torch.zeros(0, dtype=torch.bool, device=source.device)


def as_matrix(tensor: torch.Tensor) -> torch.Tensor | None:
    """A view [rows, last dimension], or None where there is none."""
    if tensor.dim() == 2:
        return tensor
    if tensor.dim() < 2:
        return tensor.reshape(1, -1)
    return tensor.flatten(0, -2) if tensor.is_contiguous() else None
