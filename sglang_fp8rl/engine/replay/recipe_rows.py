"""Most of a recorded bucket, as rows of its table, in columns: no tensor and no Python for each write.

A many-expert model records 18,000 writes of the same kind: a contiguous matrix, cast into whole blocks
of an FP8 parameter. Their places are sums of numbers that were recorded. Anything else is left to
`recipe`, which makes the views.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from ...numerics.grid import granularity_of
from ...numerics.write_table import DTYPES, ROW_FIELDS, SOURCES, Kind

if TYPE_CHECKING:
    from ...config import Options
    from ..arrival.bucket import Bucket
    from ..model.parameters import Target
    from ..native.recording import Recording


@dataclass(frozen=True)
class PlainRows:
    """The writes that are numbers alone.

    Attributes:
        rows: int64 [writes, `ROW_FIELDS`], zeros where `is_plain` is not set.
        is_plain: bool [writes].
    """

    rows: np.ndarray
    is_plain: np.ndarray


def plain_rows(recording: Recording, targets: Mapping[int, Target], options: Options) -> PlainRows:
    """Rows for the recorded writes of one bucket, in their order.

    Args:
        targets: by index, of all writes.
    """
    bucket, columns = recording.bucket, recording.columns
    position = columns.positions
    places, dtype = bucket.places()[position], _dtypes_of(bucket)[position]
    (
        offset, stride, to_offset, to_stride, dims, matrix, row, column, height, width,
    ) = columns.numbers.T  # fmt: skip
    target = _target_columns(recording, targets, options)
    bottom, right = row + height, column + width
    is_plain = (
        (dims > 0)
        & (dims == target.dims)
        & (dtype >= 0)
        # whole blocks, as `BlockGrid.is_whole`
        & (row % target.block_n == 0)
        & (column % target.block_k == 0)
        & ((bottom % target.block_n == 0) | (bottom == target.height))
        & ((right % target.block_k == 0) | (right == target.width))
    )
    scale = (
        matrix * target.scale_stride_e
        + row // target.block_n * target.scale_stride_n
        + column // target.block_k * target.scale_stride_k
    )
    rows = np.empty((len(position), ROW_FIELDS), np.int64)
    fields = (
        Kind.CAST, dtype, places[:, 0], places[:, 1] + offset * _ITEM_SIZES[dtype], stride,
        target.address + to_offset, 0, to_stride,  # one byte per element
        target.scale_address + 4 * scale, target.scale_stride_n, target.scale_stride_k,
        height, width, target.block_n, target.block_k,
    )  # fmt: skip
    for at, values in enumerate(fields):
        rows[:, at] = values
    rows[~is_plain] = 0
    return PlainRows(rows, is_plain)


_ITEM_SIZES = np.array([dtype.itemsize for dtype in SOURCES])  # by `Dtype`
assert list(SOURCES.values()) == list(range(len(SOURCES)))


def _dtypes_of(bucket: Bucket) -> np.ndarray:
    """`Dtype` of each tensor, -1 where the kernels of the bucket's device don't know it."""
    is_on_gpu = all(device.type == "cuda" for device in bucket.devices)
    known = SOURCES if is_on_gpu else DTYPES
    dtypes = bucket.dtypes()
    codes = {dtype: known.get(dtype, -1) for dtype in set(dtypes)}
    return np.fromiter(map(codes.__getitem__, dtypes), np.int64, len(dtypes))


class _TargetColumns:
    """The numbers of the FP8 parameters that writes go to, one array for each number."""

    def __init__(self, rows: np.ndarray) -> None:
        (
            self.dims, self.address, self.scale_address,
            self.scale_stride_e, self.scale_stride_n, self.scale_stride_k,
            self.block_n, self.block_k, self.height, self.width,
        ) = rows.T  # fmt: skip


def _target_columns(
    recording: Recording, targets: Mapping[int, Target], options: Options
) -> _TargetColumns:
    found, inverse = np.unique(recording.columns.targets, return_inverse=True)
    devices = recording.bucket.devices
    rows = [_target_row(targets[index], devices, options) for index in found.tolist()]
    return _TargetColumns(np.array(rows, np.int64).reshape(-1, 10)[inverse.reshape(-1)])


_NO_TARGET = (0, 0, 0, 0, 0, 0, 1, 1, 1, 1)  # its dims are nobody's


def _target_row(target: Target, devices: set[torch.device], options: Options) -> tuple[int, ...]:
    codes, scale = target.parameter.data, target.scale
    if scale is None or devices != {codes.device}:
        return _NO_TARGET
    grid = granularity_of(target.granularity, options.weight_block_size).grid(codes.shape)
    strides = scale.data.stride()
    return (
        codes.dim(), codes.data_ptr(), scale.data.data_ptr(),
        *(strides if len(strides) == 3 else (0, *strides)), *grid.block, *grid.shape,
    )  # fmt: skip
