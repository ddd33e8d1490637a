"""How an FP8 weight and its scale travel as one uint8 tensor, `NAME.fp8rl_pair`.

| bytes | what |
|---|---|
| 8 | `b"fp8rl-p1"` |
| 8 | bytes of the scale, int64 |
| | the scale, FP32, row by row |
| | the codes, e4m3fn, row by row |

For trainers that cut their tensors into calls which stand alone, as veRL does: no bucket boundary can
part a weight from its scale. Torch only.
"""

from __future__ import annotations

import math

import torch

from ..errors import RefitError

PAIR_SUFFIX = ".fp8rl_pair"
_MAGIC = int.from_bytes(b"fp8rl-p1", "little")
_HEADER = 16


def pack_pair(codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """One uint8 tensor, on the device of the parts.

    Args:
        codes: e4m3fn [N, K]. scale: FP32, of the plan's `scale_shape`.
    """
    header = torch.tensor([_MAGIC, 4 * scale.numel()], device=codes.device)
    return torch.cat([part.reshape(-1).view(torch.uint8) for part in (header, scale, codes)])


def unpack_pair(
    name: str, packed: torch.Tensor, shape: tuple[int, ...], scale_shape: tuple[int, ...]
) -> tuple[torch.Tensor, torch.Tensor]:
    """The reverse of `pack_pair`: codes and scale, as views where their alignment allows.

    Args:
        name: of the weight, for errors.
        shape, scale_shape: of the full weight and its scale.

    Raises:
        RefitError: it is no pair, or one of another shape.
    """
    scale_bytes = 4 * math.prod(scale_shape)
    expected = _HEADER + scale_bytes + math.prod(shape)
    is_bytes = packed.dtype == torch.uint8 and packed.dim() == 1 and packed.numel() >= _HEADER
    header = packed[:_HEADER].clone().view(torch.int64).tolist() if is_bytes else []
    if header != [_MAGIC, scale_bytes] or packed.numel() != expected:
        raise RefitError(
            name + PAIR_SUFFIX,
            f"{packed.dtype} of shape {tuple(packed.shape)}",
            f"codes of shape {shape} with scales of shape {scale_shape} take {expected} bytes",
            "Make it with quantize_for_refit(..., pack_pairs=True) and this server's plan.",
        )
    scale, codes = packed[_HEADER:].split([scale_bytes, expected - _HEADER - scale_bytes])
    if scale.storage_offset() % 4 or scale.data_ptr() % 4:
        scale = scale.clone()
    return codes.view(torch.float8_e4m3fn).view(shape), scale.view(torch.float32).view(scale_shape)
