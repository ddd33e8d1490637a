"""What a server computes with: a weight through the cast and back, in BF16.

The definition is `reference.through_fp8_into`; every backend gives its bytes.
"""

from __future__ import annotations

import importlib

import torch

from .cast import Backend, check_source, is_there
from .grid import PerChannel, ScaleGranularity

# Module of each backend; it has a `through_fp8_into`.
_MODULES = {"reference": ".reference", "numba": ".cpu.through_fp8", "triton": ".triton.through_fp8"}
_FASTEST = {"cpu": "numba", "cuda": "triton"}


def through_fp8(
    weight: torch.Tensor,
    granularity: ScaleGranularity,
    *,
    pow2_scale: bool = False,
    round_to_bf16: bool = True,
    name: str = "weight",
    backend: Backend = "auto",
) -> torch.Tensor:
    """Cast `weight` [N, K] (FP32, BF16 or FP16) to FP8 and back to BF16, contiguous.

    A block with a NaN or Inf comes out unquantized: whoever computes with it sees the NaN, and nothing
    here waits for a GPU.

    Args:
        pow2_scale, round_to_bf16, name, backend: as of `quantize`.

    Raises:
        QuantizationError: wrong dtype or rank.
    """
    check_source(weight, name)
    source, shape = weight.detach(), weight.shape
    block_n, block_k = granularity.block(shape)
    if block_n == 1 and shape[1] % block_k == 0:
        # A scale for each row of each rank's columns: rows of their own, as every kernel knows them.
        source, granularity = source.reshape(-1, block_k), PerChannel()
    out = torch.empty(source.shape, dtype=torch.bfloat16, device=source.device)
    module = _MODULES[_fastest(source.device) if backend == "auto" else backend]
    importlib.import_module(module, __package__).through_fp8_into(
        source, out, granularity, pow2_scale, round_to_bf16
    )
    return out.view(shape)


def _fastest(device: torch.device) -> str:
    backend = _FASTEST.get(device.type, "reference")
    return backend if is_there(backend) else "reference"
