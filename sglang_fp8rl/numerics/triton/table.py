"""Run a `CastTable` on a GPU: all blocks in one launch, ragged ones and rows in another each.

Codes that come with their scales are copied, rows of scales first.

Addresses come out of the table, so nothing is known of them at compile time; where a group is
aligned, the kernel is told so (`tl.multiple_of`), or every load would be of one element. The
arithmetic is that of `triton_cast`, integer for integer.
"""

# Triton reads these functions, not their annotations.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl

from ..write_table import BAD_SCALE, NAN_CODE, CastTable, Kind
from .cast import (
    LONGEST_ROW_READ_ONCE,
    _on_device,
    amax_to_scale_inv,
    encode_e4m3,
    fp32_bits,
    round_bits_to_bf16,
)

_ALIGNMENT = 16  # bytes of one load
_BLOCK = 128
_FIELDS = tl.constexpr(17)
# Columns of `cast_table.PIECE`, in its order.
_SOURCE, _SOURCE_OFFSET, _SOURCE_STRIDE = tl.constexpr(2), tl.constexpr(3), tl.constexpr(4)
_TARGET, _TARGET_DTYPE, _TARGET_STRIDE = tl.constexpr(5), tl.constexpr(6), tl.constexpr(7)
_SCALES, _SCALES_STRIDE0, _SCALES_STRIDE1 = tl.constexpr(8), tl.constexpr(9), tl.constexpr(10)
_BAD_SCALE, _NAN_CODE = tl.constexpr(BAD_SCALE), tl.constexpr(NAN_CODE)
_ROWS, _COLS, _BLOCK_N, _FLAGS, _FLAG_COLS = (tl.constexpr(n) for n in (11, 12, 13, 15, 16))


@triton.jit
def _source_address(addresses, row):
    return tl.load(addresses + tl.load(row + _SOURCE)) + tl.load(row + _SOURCE_OFFSET)


@triton.jit
def table_block_kernel(
    table,
    items,
    addresses,
    flags,
    ALIGNED: tl.constexpr,
    KIND: tl.constexpr,
    POW2: tl.constexpr,
    ROUND: tl.constexpr,
):
    """One 128×128 block per program. `items` [programs, 2]: piece, and block of that piece."""
    pid = tl.program_id(0)
    row = table + tl.load(items + 2 * pid).to(tl.int64) * _FIELDS
    block = tl.load(items + 2 * pid + 1)
    flag_cols = tl.load(row + _FLAG_COLS).to(tl.int32)
    block_n, block_k = (block // flag_cols).to(tl.int64), (block % flag_cols).to(tl.int64)
    source_stride, target_stride = tl.load(row + _SOURCE_STRIDE), tl.load(row + _TARGET_STRIDE)
    n = block_n * 128 + tl.arange(0, 128)
    k = block_k * 128 + tl.arange(0, 128)
    # Not in a function of its own: what `multiple_of` says is lost when that is inlined.
    address = _source_address(addresses, row)
    if KIND == 0:
        source = address.to(tl.pointer_type(tl.int32))
    else:
        source = address.to(tl.pointer_type(tl.int16))
    target = tl.load(row + _TARGET).to(tl.pointer_type(tl.uint8))
    if ALIGNED:
        source_stride, target_stride = (
            tl.multiple_of(source_stride, 16),
            tl.multiple_of(target_stride, 16),
        )
        source, target = tl.multiple_of(source, 16), tl.multiple_of(target, 16)
        k = tl.max_contiguous(tl.multiple_of(k, 128), 128)
        x = tl.load(source + n[:, None] * source_stride + k[None, :])
    else:
        inside = (n < tl.load(row + _ROWS))[:, None] & (k < tl.load(row + _COLS))[None, :]
        x = tl.load(source + n[:, None] * source_stride + k[None, :], mask=inside, other=0)
    bits = fp32_bits(x, KIND)
    amax = tl.max(tl.max(bits & 0x7FFFFFFF, axis=1), axis=0)
    scale, finite = amax_to_scale_inv(amax, POW2, ROUND)
    if ROUND:
        bits = round_bits_to_bf16(bits)
    codes = encode_e4m3(bits, scale)
    where = target + n[:, None] * target_stride + k[None, :]
    if ALIGNED:
        if finite:
            tl.store(where, codes)
    else:
        tl.store(where, codes, mask=inside & finite)
    scales = tl.load(row + _SCALES).to(tl.pointer_type(tl.float32))
    at = block_n * tl.load(row + _SCALES_STRIDE0) + block_k * tl.load(row + _SCALES_STRIDE1)
    tl.store(scales + at, scale, mask=finite)
    tl.store(flags + tl.load(row + _FLAGS) + block, 1 - finite.to(tl.int8))


@triton.jit
def table_row_kernel(
    table,
    items,
    addresses,
    flags,
    CHUNK: tl.constexpr,
    COPY: tl.constexpr,
    KIND: tl.constexpr,
    POW2: tl.constexpr,
    ROUND: tl.constexpr,
):
    """One row per program: a channel is cast, a row of a parameter in high precision copied.

    The first pass takes the maximum; the second reads the row again, from the cache.
    """
    pid = tl.program_id(0)
    row = table + tl.load(items + 2 * pid).to(tl.int64) * _FIELDS
    n = tl.load(items + 2 * pid + 1).to(tl.int64)
    cols = tl.load(row + _COLS).to(tl.int32)
    address = _source_address(addresses, row)
    if KIND == 0:
        source = address.to(tl.pointer_type(tl.int32))
    else:
        source = address.to(tl.pointer_type(tl.int16))
    source += n * tl.load(row + _SOURCE_STRIDE)
    k = tl.arange(0, CHUNK)
    largest = tl.zeros([CHUNK], tl.int32)
    for first in range(0, cols, CHUNK):
        x = tl.load(source + first + k, mask=first + k < cols, other=0)
        largest = tl.maximum(largest, fp32_bits(x, KIND) & 0x7FFFFFFF)
    amax = tl.max(largest, axis=0)
    target = tl.load(row + _TARGET)
    offset = n * tl.load(row + _TARGET_STRIDE)
    if COPY:
        finite = amax < 0x7F800000
        to_fp32 = tl.load(row + _TARGET_DTYPE) == 0
        wide = target.to(tl.pointer_type(tl.int32)) + offset
        slim = target.to(tl.pointer_type(tl.int16)) + offset
        for first in range(0, cols, CHUNK):
            inside = first + k < cols
            bits = fp32_bits(tl.load(source + first + k, mask=inside, other=0), KIND)
            tl.store(wide + first + k, bits, mask=inside & finite & to_fp32)
            rounded = (round_bits_to_bf16(bits) >> 16).to(tl.int16)
            tl.store(slim + first + k, rounded, mask=inside & finite & (to_fp32 == 0))
    else:
        scale, finite = amax_to_scale_inv(amax, POW2, ROUND)
        codes = target.to(tl.pointer_type(tl.uint8)) + offset
        for first in range(0, cols, CHUNK):
            inside = first + k < cols
            bits = fp32_bits(tl.load(source + first + k, mask=inside, other=0), KIND)
            if ROUND:
                bits = round_bits_to_bf16(bits)
            tl.store(codes + first + k, encode_e4m3(bits, scale), mask=inside & finite)
        scales = tl.load(row + _SCALES).to(tl.pointer_type(tl.float32))
        tl.store(scales + n * tl.load(row + _SCALES_STRIDE0), scale, mask=finite)
    tl.store(flags + tl.load(row + _FLAGS) + n, 1 - finite.to(tl.int8))


@triton.jit
def table_scales_kernel(table, items, addresses, flags, CHUNK: tl.constexpr):
    """One row of scales per program, copied if all of it is positive and finite."""
    pid = tl.program_id(0)
    row = table + tl.load(items + 2 * pid).to(tl.int64) * _FIELDS
    n = tl.load(items + 2 * pid + 1).to(tl.int64)
    cols = tl.load(row + _COLS).to(tl.int32)
    source = _source_address(addresses, row).to(tl.pointer_type(tl.int32))
    source += n * tl.load(row + _SOURCE_STRIDE)
    target = tl.load(row + _TARGET).to(tl.pointer_type(tl.int32))
    target += n * tl.load(row + _TARGET_STRIDE)
    k = tl.arange(0, CHUNK)
    bad = tl.zeros([CHUNK], tl.int32)
    for first in range(0, cols, CHUNK):
        bits = tl.load(source + first + k, mask=first + k < cols, other=1)
        bad |= ((bits <= 0) | (bits >= 0x7F800000)).to(tl.int32)
    good = tl.max(bad, axis=0) == 0
    for first in range(0, cols, CHUNK):
        inside = first + k < cols
        tl.store(target + first + k, tl.load(source + first + k, mask=inside), mask=inside & good)
    tl.store(flags + tl.load(row + _FLAGS) + n, tl.where(good, 0, _BAD_SCALE).to(tl.int8))


@triton.jit
def table_codes_kernel(table, items, addresses, flags, CHUNK: tl.constexpr, ALIGNED: tl.constexpr):
    """One row of codes per program, copied if its scales were and none is NaN: four at a time if
    `ALIGNED`.

    Programs of the same row of blocks may set its flag while others read it: only to NAN_CODE, which
    stops no other row.
    """
    pid = tl.program_id(0)
    row = table + tl.load(items + 2 * pid).to(tl.int64) * _FIELDS
    n = tl.load(items + 2 * pid + 1).to(tl.int64)
    cols = tl.load(row + _COLS).to(tl.int32)
    source = _source_address(addresses, row) + n * tl.load(row + _SOURCE_STRIDE)
    target = tl.load(row + _TARGET) + n * tl.load(row + _TARGET_STRIDE)
    flag = flags + tl.load(row + _FLAGS) + n // tl.load(row + _BLOCK_N)
    good = tl.load(flag) != _BAD_SCALE
    k = tl.arange(0, CHUNK)
    nan = tl.zeros([CHUNK], tl.int32)
    if ALIGNED:
        from4 = tl.multiple_of(source.to(tl.pointer_type(tl.int32)), 16)
        to4 = tl.multiple_of(target.to(tl.pointer_type(tl.int32)), 16)
        words = tl.multiple_of(cols // 4, 4)
        for first in range(0, words, CHUNK):
            x = tl.load(from4 + first + k, mask=(first + k < words) & good, other=0)
            # Of the magnitudes 0 to 0x7F, only the last carries into the sign's place.
            nan |= ((x & 0x7F7F7F7F) + 0x01010101) & -0x7F7F7F80
        is_nan = tl.max((nan != 0).to(tl.int32), axis=0) != 0
        for first in range(0, words, CHUNK):
            inside = (first + k < words) & good & (is_nan == 0)
            tl.store(to4 + first + k, tl.load(from4 + first + k, mask=inside), mask=inside)
    else:
        from1, to1 = source.to(tl.pointer_type(tl.int8)), target.to(tl.pointer_type(tl.int8))
        for first in range(0, cols, CHUNK):
            x = tl.load(from1 + first + k, mask=(first + k < cols) & good, other=0)
            nan |= ((x & 0x7F) == 0x7F).to(tl.int32)
        is_nan = tl.max(nan, axis=0) != 0
        for first in range(0, cols, CHUNK):
            inside = (first + k < cols) & good & (is_nan == 0)
            tl.store(to1 + first + k, tl.load(from1 + first + k, mask=inside), mask=inside)
    tl.store(flag, tl.full([], _NAN_CODE, tl.int8), mask=is_nan)


@dataclass(frozen=True)
class _Launch:
    """Programs that share a kernel and its constants."""

    kernel: Any
    items: torch.Tensor
    constants: dict[str, int | bool]
    num_warps: int


class TritonTable:
    """A table on a GPU, its programs grouped into launches.

    Args:
        device: of the destinations; "cpu" only works in Triton's interpreter.
        pow2_scale, round_to_bf16: as in `cast_blockwise_into`; copies take no notice of them.
    """

    def __init__(
        self, table: CastTable, device: torch.device, *, pow2_scale: bool, round_to_bf16: bool
    ) -> None:
        self.table, self._device = table, device
        self._rounding = {"POW2": bool(pow2_scale), "ROUND": bool(round_to_bf16)}
        rows = table.pieces.view(np.int64).reshape(len(table.pieces), -1)
        self._rows = torch.from_numpy(rows.copy()).to(device)
        self._flags = torch.zeros(max(1, table.flag_count), dtype=torch.int8, device=device)
        self._launches = [self._launch(*group) for group in _groups(table.pieces)]

    @property
    def launches(self) -> int:
        return len(self._launches)

    @property
    def nbytes(self) -> int:
        """Device memory of the table, its items and its flags."""
        held = [self._rows, self._flags, *(launch.items for launch in self._launches)]
        return sum(tensor.nbytes for tensor in held)

    def _launch(self, key: tuple, pieces: np.ndarray) -> _Launch:
        kind, block, aligned, dtype = key
        rows = self.table.pieces[pieces]
        is_block = kind == Kind.CAST and block
        heights = np.where(is_block, -(-rows["rows"] // _BLOCK) * rows["flag_cols"], rows["rows"])
        owner = np.repeat(pieces, heights)
        first = np.repeat(np.cumsum(heights) - heights, heights)
        items = np.stack([owner, np.arange(len(owner)) - first], 1).astype(np.int32)
        constants: dict[str, int | bool] = {}
        if kind in (Kind.CAST, Kind.COPY):
            constants = {"KIND": int(dtype), **self._rounding}
        if is_block or kind == Kind.CODES:
            constants["ALIGNED"] = bool(aligned)
        kernel, warps = table_block_kernel, 8
        if not is_block:
            longest = int(rows["cols"].max()) // (4 if kind == Kind.CODES and aligned else 1)
            chunk = max(16, min(triton.next_power_of_2(longest), LONGEST_ROW_READ_ONCE))
            constants["CHUNK"] = chunk
            warps = max(1, min(16, chunk // 512))
            kernel = {Kind.SCALES: table_scales_kernel, Kind.CODES: table_codes_kernel}.get(
                kind, table_row_kernel
            )
        if kernel is table_row_kernel:
            constants["COPY"] = kind == Kind.COPY
        return _Launch(kernel, torch.from_numpy(items).to(self._device), constants, warps)

    def run(self, addresses: Sequence[int]) -> np.ndarray:
        """As `TableRunner.run`; waits for the device, so the sender may reuse its memory."""
        host = torch.tensor(addresses, dtype=torch.int64)
        whole = not bool((host % _ALIGNMENT).any())
        sources = host.to(self._device)
        with _on_device(self._device):
            for launch in self._launches:
                constants = launch.constants
                if constants.get("ALIGNED") and not whole:
                    constants = {**constants, "ALIGNED": False}
                arguments = (self._rows, launch.items, sources, self._flags)
                grid = (len(launch.items),)
                launch.kernel[grid](*arguments, **constants, num_warps=launch.num_warps)
        return self._flags.cpu().numpy().view(np.uint8)[: self.table.flag_count]


def _groups(pieces: np.ndarray) -> list[tuple[tuple, np.ndarray]]:
    """(key, indices of pieces): key is kind, block or row, aligned or not, source dtype.

    In the order of their kinds: codes are launched behind their scales.
    """
    is_block = (pieces["kind"] == Kind.CAST) & (pieces["block_n"] > 1)
    is_codes = pieces["kind"] == Kind.CODES
    size = np.array([4, 2, 2, 1])[pieces["source_dtype"]]
    in_whole_blocks = (pieces["rows"] % _BLOCK == 0) & (pieces["cols"] % _BLOCK == 0)
    aligned = (
        ((is_block & in_whole_blocks) | (is_codes & (pieces["cols"] % _ALIGNMENT == 0)))
        & (pieces["source_offset"] % _ALIGNMENT == 0)
        & (pieces["source_stride"] * size % _ALIGNMENT == 0)
        & (pieces["source_stride"] % 16 == 0)
        & (pieces["destination"] % _ALIGNMENT == 0)
        & (pieces["destination_stride"] % _ALIGNMENT == 0)
    )
    keys = np.stack([pieces["kind"], is_block, aligned, pieces["source_dtype"]], 1)
    found, inverse = np.unique(keys, axis=0, return_inverse=True)
    inverse = inverse.reshape(-1)
    return [(tuple(key), np.flatnonzero(inverse == at)) for at, key in enumerate(found.tolist())]
