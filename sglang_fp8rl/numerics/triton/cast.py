"""The GPU cast: one Triton program per block, or per row; any strides, no padding, no cropping.

The source arrives as integer bits and is rounded with integer arithmetic: Triton's interpreter
truncates FP32→BF16 and rounds FP8 casts otherwise than hardware does, so a kernel that casts could
not be checked without a GPU. Likewise `div_rn`, because Triton's `/` is approximate, and an integer
maximum, because `tl.maximum` drops NaN. What is left of floating point is one division and one
addition, both IEEE on either side.

Importing this module imports Triton; `cast.py` does so on first use.
"""

# Triton reads these functions, not their annotations.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import contextlib

import torch
import triton
import triton.language as tl

from .. import reference

# Longest row that one program keeps in registers between its two passes.
LONGEST_ROW_READ_ONCE = 16384
LARGEST_BLOCK = 32768

_BITS = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float16: torch.int16}
_KIND = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}


@triton.jit
def fp32_bits(x, KIND: tl.constexpr):
    """FP32 bits (int32) of source bits: KIND 0 is FP32 (int32), 1 BF16, 2 FP16 (int16)."""
    if KIND == 0:
        bits = x
    elif KIND == 1:
        bits = x.to(tl.int32) << 16
    else:
        bits = x.to(tl.float16, bitcast=True).to(tl.float32).to(tl.int32, bitcast=True)
    return bits


@triton.jit
def round_bits_to_bf16(bits):
    """Round to nearest even on FP32 bits; the magnitude may carry into Inf, as it should."""
    return (bits + 0x7FFF + ((bits >> 16) & 1)) & -65536


@triton.jit
def amax_to_scale_inv(amax, POW2: tl.constexpr, ROUND: tl.constexpr):
    """Bits of an unrounded amax to (scale FP32, finite int1); as `reference.amax_to_scale_inv`."""
    finite = amax < 0x7F800000
    if ROUND:
        amax = tl.where(finite, round_bits_to_bf16(amax), amax)  # a NaN would wrap around
        finite = amax < 0x7F800000
    scale = tl.math.div_rn(amax.to(tl.float32, bitcast=True), 448.0)
    # Positive floats sort like their bits, so the floor at the smallest normal is an integer max.
    bits = tl.maximum(scale.to(tl.int32, bitcast=True), 0x00800000)
    if POW2:
        bits = (bits + 0x007FFFFF) & 0x7F800000
    bits = tl.where(amax == 0, 0x3F800000, bits)
    return bits.to(tl.float32, bitcast=True), finite


@triton.jit
def encode_e4m3(bits, scale):
    """Codes (uint8) of finite FP32 `bits` over `scale`: nearest even, saturating at 448.

    For 2**e <= |y| < 2**(e+1) the sum |y| + 2**(e+20) keeps no bit below 2**(e-3), the e4m3 ulp;
    e is at least -6, so subnormals need no branch. What the sum added to the bits of 2**(e+20)
    is |y| in ulps.
    """
    y = tl.math.div_rn(bits.to(tl.float32, bitcast=True), scale).to(tl.int32, bitcast=True)
    a = tl.minimum(y & 0x7FFFFFFF, 0x43E00000)  # 448.0
    exponent = tl.maximum(a & 0x7F800000, 0x3C800000)  # 2**-6
    magic = exponent + (20 << 23)
    lifted = a.to(tl.float32, bitcast=True) + magic.to(tl.float32, bitcast=True)
    code = lifted.to(tl.int32, bitcast=True) - magic + ((exponent - 0x3C800000) >> 20)
    return (code | ((y >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def cast_block_kernel(
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
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PADDED_N: tl.constexpr,
    PADDED_K: tl.constexpr,
    KIND: tl.constexpr,
    POW2: tl.constexpr,
    ROUND: tl.constexpr,
):
    """One block per program, columns fastest. PADDED_* are BLOCK_* rounded up to powers of two."""
    pid = tl.program_id(0)
    blocks_k = tl.cdiv(cols, BLOCK_K)
    block_n = (pid // blocks_k).to(tl.int64)
    block_k = (pid % blocks_k).to(tl.int64)
    in_n = tl.arange(0, PADDED_N)
    in_k = tl.arange(0, PADDED_K)
    n = block_n * BLOCK_N + in_n
    k = block_k * BLOCK_K + in_k
    inside = ((in_n < BLOCK_N) & (n < rows))[:, None] & ((in_k < BLOCK_K) & (k < cols))[None, :]

    where = n[:, None] * source_stride_n + k[None, :] * source_stride_k
    bits = fp32_bits(tl.load(source + where, mask=inside, other=0), KIND)
    amax = tl.max(tl.max(bits & 0x7FFFFFFF, axis=1), axis=0)
    scale, finite = amax_to_scale_inv(amax, POW2, ROUND)
    if ROUND:
        bits = round_bits_to_bf16(bits)
    where = n[:, None] * codes_stride_n + k[None, :]
    tl.store(codes + where, encode_e4m3(bits, scale), mask=inside & finite)
    tl.store(scales + block_n * scales_stride_n + block_k * scales_stride_k, scale, mask=finite)
    tl.store(nonfinite + pid, 1 - finite.to(tl.int8))


@triton.jit
def cast_row_kernel(
    source,
    codes,
    scales,
    nonfinite,
    cols,
    source_stride_n,
    source_stride_k,
    codes_stride_n,
    scales_stride_n,
    CHUNK: tl.constexpr,
    ONE_CHUNK: tl.constexpr,
    KIND: tl.constexpr,
    POW2: tl.constexpr,
    ROUND: tl.constexpr,
):
    """One row per program: read once where CHUNK covers the row, else twice (the second from L2)."""
    n = tl.program_id(0).to(tl.int64)
    source += n * source_stride_n
    codes += n * codes_stride_n
    k = tl.arange(0, CHUNK).to(tl.int64)
    if ONE_CHUNK:
        bits = fp32_bits(tl.load(source + k * source_stride_k, mask=k < cols, other=0), KIND)
        scale, finite = amax_to_scale_inv(tl.max(bits & 0x7FFFFFFF, axis=0), POW2, ROUND)
        if ROUND:
            bits = round_bits_to_bf16(bits)
        tl.store(codes + k, encode_e4m3(bits, scale), mask=(k < cols) & finite)
    else:
        largest = tl.zeros([CHUNK], tl.int32)
        for first in range(0, cols, CHUNK):
            inside = first + k < cols
            x = tl.load(source + (first + k) * source_stride_k, mask=inside, other=0)
            largest = tl.maximum(largest, fp32_bits(x, KIND) & 0x7FFFFFFF)
        scale, finite = amax_to_scale_inv(tl.max(largest, axis=0), POW2, ROUND)
        for first in range(0, cols, CHUNK):
            inside = first + k < cols
            x = tl.load(source + (first + k) * source_stride_k, mask=inside, other=0)
            bits = fp32_bits(x, KIND)
            if ROUND:
                bits = round_bits_to_bf16(bits)
            tl.store(codes + first + k, encode_e4m3(bits, scale), mask=inside & finite)
    tl.store(scales + n * scales_stride_n, scale, mask=finite)
    tl.store(nonfinite + n, 1 - finite.to(tl.int8))


def cast_into(
    source: torch.Tensor,
    qweight: torch.Tensor,
    weight_scale_inv: torch.Tensor,
    block_size: tuple[int, int],
    pow2_scale: bool,
    round_to_bf16: bool,
) -> torch.Tensor:
    """Cast a checked [N, K] source into codes [N, K] and scales [row blocks, column blocks].

    Blocks of (1, K) are channels. Returns bool [row blocks, column blocks], True where a block is
    not finite and was left alone; on the source's device, without waiting for it. A block too large
    for one program goes to the PyTorch cast.
    """
    rows, cols = source.shape
    block_n, block_k = block_size
    padded_n, padded_k = triton.next_power_of_2(block_n), triton.next_power_of_2(block_k)
    channels = block_size == (1, cols)
    if padded_n * padded_k > LARGEST_BLOCK and not channels:
        return reference.cast_into(
            source, qweight, weight_scale_inv, block_size, pow2_scale, round_to_bf16
        )
    nonfinite = torch.empty(weight_scale_inv.shape, dtype=torch.bool, device=source.device)
    buffers = (
        source.detach().view(_BITS[source.dtype]),
        qweight.detach().view(torch.uint8),
        weight_scale_inv.detach(),
        nonfinite.view(torch.int8),
    )
    options = {"KIND": _KIND[source.dtype], "POW2": bool(pow2_scale), "ROUND": bool(round_to_bf16)}
    with _on_device(source.device):
        if channels:
            chunk = min(triton.next_power_of_2(cols), LONGEST_ROW_READ_ONCE)
            cast_row_kernel[(rows,)](
                *buffers,
                cols,
                *source.stride(),
                qweight.stride(0),
                weight_scale_inv.stride(0),
                CHUNK=chunk,
                ONE_CHUNK=cols <= chunk,
                **options,
                num_warps=max(1, min(16, chunk // 512)),
            )
        else:
            cast_block_kernel[(weight_scale_inv.numel(),)](
                *buffers,
                rows,
                cols,
                *source.stride(),
                qweight.stride(0),
                *weight_scale_inv.stride(),
                BLOCK_N=block_n,
                BLOCK_K=block_k,
                PADDED_N=padded_n,
                PADDED_K=padded_k,
                **options,
                num_warps=max(1, min(8, padded_n * padded_k // 1024)),
            )
    return nonfinite


def _on_device(device: torch.device) -> contextlib.AbstractContextManager:
    """Triton launches on the current device; a CPU tensor only gets here in the interpreter."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()
