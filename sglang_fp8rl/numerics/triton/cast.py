"""The GPU cast of one tensor: one Triton program per block, or per row; no padding, no cropping.

128×128 blocks and rows run the functions of the tables (`tiles.py`). Blocks of another size, which no
server has, are cast by PyTorch.

Importing this module imports Triton; `numerics/cast.py` does so on first use.
"""

# Triton reads these functions, not their annotations.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import contextlib
from typing import Any

import torch
import triton
import triton.language as tl

from .. import reference
from ..grid import Blockwise, PerChannel, ScaleGranularity
from .arithmetic import BF16, FP16, FP32
from .hardware import has_packed_kernels, row_warps, tile_options
from .tiles import cast_row, cast_tile

# Longest row that one program keeps in registers between its two passes.
LONGEST_ROW_READ_ONCE = 16384
BLOCK = (128, 128)
WIDEST = 16  # bytes of a load or store

_BITS = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float16: torch.int16}
_KIND = {torch.float32: FP32.value, torch.bfloat16: BF16.value, torch.float16: FP16.value}
# Alignments are told by constants; a kernel for each stride would be compiled for nothing.
_SIZES = ("rows", "cols", "source_stride_n", "source_stride_k", "codes_stride_n")
_STRIDES = ("scales_stride_n", "scales_stride_k")


@triton.jit(do_not_specialize=[*_SIZES, *_STRIDES])
def cast_tile_kernel(
    source,
    codes,
    scales,
    nonfinite,
    rows,
    cols,
    source_stride_n,
    source_stride_k,
    codes_stride_n,
    scales_stride_n,
    scales_stride_k,
    CONTIGUOUS: tl.constexpr,
    RAGGED: tl.constexpr,
    SOURCE_ALIGN: tl.constexpr,
    TARGET_ALIGN: tl.constexpr,
    KIND: tl.constexpr,
    POW2: tl.constexpr,
    ROUND: tl.constexpr,
    PACKED: tl.constexpr,
):
    """One 128×128 block per program, columns fastest."""
    pid = tl.program_id(0)
    blocks_k = tl.cdiv(cols, 128).to(tl.int32)
    block_n, block_k = (pid // blocks_k).to(tl.int64), (pid % blocks_k).to(tl.int64)
    size: tl.constexpr = 4 if KIND == FP32 else 2
    stride_n, codes_stride = source_stride_n.to(tl.int64), codes_stride_n.to(tl.int64)
    if CONTIGUOUS:
        stride_k = 1
        corner = block_n * 128 * stride_n + block_k * 128
    else:
        stride_k = source_stride_k.to(tl.int64)
        corner = block_n * 128 * stride_n + block_k * 128 * stride_k
    scale, finite = cast_tile(
        source.to(tl.int64) + corner * size,
        stride_n,
        stride_k,
        codes.to(tl.int64) + block_n * 128 * codes_stride + block_k * 128,
        codes_stride,
        (rows - block_n * 128).to(tl.int32),
        (cols - block_k * 128).to(tl.int32),
        RAGGED,
        SOURCE_ALIGN,
        TARGET_ALIGN,
        KIND,
        POW2,
        ROUND,
        PACKED,
    )
    tl.store(scales + block_n * scales_stride_n + block_k * scales_stride_k, scale, mask=finite)
    tl.store(nonfinite + pid, 1 - finite.to(tl.int8))


@triton.jit(do_not_specialize=[*_SIZES, *_STRIDES])
def cast_row_kernel(
    source,
    codes,
    scales,
    nonfinite,
    rows,
    cols,
    source_stride_n,
    source_stride_k,
    codes_stride_n,
    scales_stride_n,
    scales_stride_k,
    CONTIGUOUS: tl.constexpr,
    CHUNK: tl.constexpr,
    ONE_CHUNK: tl.constexpr,
    SOURCE_ALIGN: tl.constexpr,
    TARGET_ALIGN: tl.constexpr,
    KIND: tl.constexpr,
    POW2: tl.constexpr,
    ROUND: tl.constexpr,
    PACKED: tl.constexpr,
):
    """One row per program."""
    n = tl.program_id(0).to(tl.int64)
    size: tl.constexpr = 4 if KIND == FP32 else 2
    stride_k = 1 if CONTIGUOUS else source_stride_k.to(tl.int64)
    scale, finite = cast_row(
        source.to(tl.int64) + n * source_stride_n * size,
        stride_k,
        codes.to(tl.int64) + n * codes_stride_n,
        cols.to(tl.int32),
        CHUNK,
        ONE_CHUNK,
        SOURCE_ALIGN,
        TARGET_ALIGN,
        KIND,
        POW2,
        ROUND,
        PACKED,
    )
    tl.store(scales + n * scales_stride_n, scale, mask=finite)
    tl.store(nonfinite + n, 1 - finite.to(tl.int8))


def cast_into(
    source: torch.Tensor,
    qweight: torch.Tensor,
    weight_scale_inv: torch.Tensor,
    granularity: ScaleGranularity,
    pow2_scale: bool,
    round_to_bf16: bool,
) -> torch.Tensor:
    """Cast a checked [N, K] source into codes [N, K] and scales of the granularity's shape.

    Returns bool of that shape, True where a block is not finite and was left alone; on the source's
    device, without waiting for it. Blocks of another size than 128×128 go to the PyTorch cast.
    """
    rows, cols = source.shape
    is_per_channel = isinstance(granularity, PerChannel)
    if not is_per_channel and granularity != Blockwise(*BLOCK):
        return reference.cast_into(
            source, qweight, weight_scale_inv, granularity, pow2_scale, round_to_bf16
        )
    nonfinite = torch.empty(weight_scale_inv.shape, dtype=torch.bool, device=source.device)
    arguments = (
        source.detach().view(_BITS[source.dtype]),
        qweight.detach().view(torch.int8),
        weight_scale_inv.detach(),
        nonfinite.view(torch.int8),
        rows,
        cols,
        *source.stride(),
        qweight.stride(0),
        *weight_scale_inv.stride(),
    )
    contiguous = source.stride(1) == 1 or cols == 1
    size = source.element_size()
    source_bytes = (source.data_ptr(), source.stride(0) * size)
    options: dict[str, Any] = {
        "CONTIGUOUS": contiguous,
        "SOURCE_ALIGN": common_alignment(*source_bytes) if contiguous else size,
        "TARGET_ALIGN": common_alignment(qweight.data_ptr(), qweight.stride(0), cols),
        "KIND": _KIND[source.dtype],
        "POW2": bool(pow2_scale),
        "ROUND": bool(round_to_bf16),
        "PACKED": round_to_bf16 and has_packed_kernels(source.device),
    }
    with _on_device(source.device):
        if is_per_channel:
            chunk = min(triton.next_power_of_2(cols), LONGEST_ROW_READ_ONCE)
            options |= {"CHUNK": max(16, chunk), "ONE_CHUNK": cols <= chunk}
            cast_row_kernel[(rows,)](*arguments, **options, num_warps=row_warps(chunk))
        else:
            options["RAGGED"] = bool(rows % BLOCK[0] or cols % BLOCK[1])
            launch = tile_options(options["TARGET_ALIGN"])
            cast_tile_kernel[(weight_scale_inv.numel(),)](*arguments, **options, **launch)
    return nonfinite


def common_alignment(*sizes: int) -> int:
    """The largest power of two that divides all, up to the widest load."""
    both = WIDEST
    for size in sizes:
        both |= size
    return both & -both


def _on_device(device: torch.device) -> contextlib.AbstractContextManager:
    """Triton launches on the current device; a CPU tensor only gets here in the interpreter."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()
