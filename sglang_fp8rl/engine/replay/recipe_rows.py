"""Most of a recorded bucket, as rows of its table, without making a tensor for each.

A many-expert model records 18,000 writes of the same kind: a contiguous matrix, cast into whole blocks
of an FP8 parameter. Their places are sums of numbers that were recorded. Anything else is left to
`recipe`, which makes the views.
"""

from __future__ import annotations

import torch

from ...config import Options
from ...numerics.grid import granularity_of
from ...numerics.write_table import DTYPES, SOURCES, Kind, Row
from ..arrival.bucket import Bucket
from ..model.parameters import Target
from ..native.recording import RecordedPiece


class TableRows:
    """Rows for the writes of one bucket.

    Args:
        bucket: that was recorded.
        options: of the model.
    """

    def __init__(self, bucket: Bucket, options: Options) -> None:
        self._bucket = bucket
        self._block_size = options.weight_block_size
        self._targets: dict[int, _Target | None] = {}

    def row(self, recorded: RecordedPiece) -> Row | None:
        """The row of a write; None where it takes a closer look."""
        target = self._target(recorded.target)
        write, region = recorded.write, recorded.write.write.region
        shape, stride = write.shape, write.stride
        if target is None or region is None or len(shape) != 2:
            return None
        kind = self._bucket.kind(recorded.position)
        known = SOURCES if kind.device.type == "cuda" else DTYPES
        to_shape, to_stride = write.write.shape, write.write.stride
        if (
            kind.device != target.device
            or kind.dtype not in known
            or to_shape != shape
            or not shape[0] * shape[1]
            or stride[1] != 1
            or to_stride[1] != 1
        ):
            return None
        expert = region.start[0] if len(region.start) == 3 else 0
        if len(region.start) != target.dim or (target.dim == 3 and region.shape[0] != 1):
            return None
        place = region.start[-2:]
        if region.shape[-2:] != shape or not target.grid.is_whole(place, shape):
            return None
        (row, column), (block_n, block_k) = place, target.grid.block
        stride_e, stride_n, stride_k = target.scale_strides
        scales = expert * stride_e + row // block_n * stride_n + column // block_k * stride_k
        first, start = self._bucket.place(recorded.position)
        return (
            Kind.CAST, known[kind.dtype], first, start + write.offset * kind.dtype.itemsize, stride[0],
            target.address + write.write.offset, 0, to_stride[0],
            target.scale_address + 4 * scales, stride_n, stride_k,
            *shape, block_n, block_k,
        )  # fmt: skip

    def _target(self, target: Target) -> _Target | None:
        if target.index not in self._targets:
            made = _Target(target, self._block_size) if target.is_fp8 else None
            self._targets[target.index] = made
        return self._targets[target.index]


class _Target:
    """The numbers of one FP8 parameter and its scales."""

    def __init__(self, target: Target, block_size: tuple[int, int]) -> None:
        codes, scale = target.parameter.data, target.scale
        assert scale is not None
        self.device: torch.device = codes.device
        self.dim = codes.dim()
        self.grid = granularity_of(target.granularity, block_size).grid(codes.shape)
        self.address = codes.data_ptr()  # one byte per element
        self.scale_address = scale.data.data_ptr()
        strides = scale.data.stride()
        self.scale_strides = strides if len(strides) == 3 else (0, *strides)
