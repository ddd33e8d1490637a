"""What shares one scale, and which scales belong to a part of a matrix. Pure integers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from ..errors import QuantizationError

if TYPE_CHECKING:
    import numpy as np

Pair = tuple[int, int]
Count = TypeVar("Count", int, "np.ndarray")


def ceil_div(whole: Count, part: Count | int) -> Count:
    """`whole / part`, rounded up."""
    return -(-whole // part)


def sides_of(shape: Sequence[int], name: str = "weight") -> Pair:
    """`[N, K]` of a matrix, or of each matrix of a stack; raises `QuantizationError` of what has no rows."""
    if len(shape) < 2:
        raise QuantizationError(
            name,
            f"shape {list(shape)}",
            "scales belong to blocks of a matrix [N, K], and it has fewer than two dimensions",
            "Send the matrix, or what is served of it in high precision",
        )
    return shape[-2], shape[-1]


@dataclass(frozen=True)
class BlockGrid:
    """One matrix cut into blocks that have a scale each; the last of either side may be smaller.

    Attributes:
        shape: `[N, K]` of the matrix.
        block: `[block_n, block_k]`.
    """

    shape: Pair
    block: Pair

    @property
    def scale_shape(self) -> Pair:
        """`[ceil(N / block_n), ceil(K / block_k)]`."""
        return ceil_div(self.shape[0], self.block[0]), ceil_div(self.shape[1], self.block[1])

    def is_whole(self, start: Sequence[int], shape: Sequence[int]) -> bool:
        """Whether a box consists of whole blocks, so that its scales depend on nothing outside of it.

        A box without rows or columns does.

        Args:
            start, shape: first row and column, and how many of each.
        """
        # Asked for each of 18,000 writes: no loop, no generator.
        (row, column), (height, width) = start, shape
        block_n, block_k = self.block
        bottom, right = row + height, column + width
        return not (
            (height and (row % block_n or (bottom % block_n and bottom != self.shape[0])))
            or (width and (column % block_k or (right % block_k and right != self.shape[1])))
        )

    def scales_of(
        self, start: Sequence[int], shape: Sequence[int], *, name: str = "weight"
    ) -> tuple[slice, slice]:
        """The scales of a box of whole blocks, as slices of scales of `scale_shape`.

        Args:
            start, shape: first row and column, and how many of each.
            name: the tensor's, for the error.

        Raises:
            QuantizationError: the box starts or ends inside a block. That block's scale depends on
                values that another rank holds, so no rank can be given its own part of it.
        """
        if not self.is_whole(start, shape):
            rows, columns = (f"{at}:{at + size}" for at, size in zip(start, shape, strict=True))
            raise QuantizationError(
                name,
                f"shard [{rows}, {columns}] of {list(self.shape)}",
                f"it starts or ends inside a block of {list(self.block)}, so no scale is its alone",
                "Send this tensor in BF16 or FP32 and let the engine quantize its own shard.",
            )
        rows_of, columns_of = (
            # Rounded up: an empty box may start behind the last block, which may be short.
            slice(ceil_div(at, step), ceil_div(at + size, step))
            for at, size, step in zip(start, shape, self.block, strict=True)
        )
        return rows_of, columns_of

    def strips(self, elements: int) -> Iterator[tuple[slice, slice]]:
        """Cut between rows of blocks into strips of about so many `elements`, of one row of blocks at least.

        Yields:
            the rows of a strip, and those of its scales.
        """
        rows, cols = self.shape
        height = max(1, elements // (self.block[0] * cols))
        for first in range(0, self.scale_shape[0], height):
            end = first + height
            yield slice(first * self.block[0], min(end * self.block[0], rows)), slice(first, end)

    def values_of(self, row: int, column: int) -> tuple[slice, slice]:
        """The rows and columns that the scale at `[row, column]` is shared by."""
        rows, columns = (
            slice(at * step, min((at + 1) * step, full))
            for at, step, full in zip((row, column), self.block, self.shape, strict=True)
        )
        return rows, columns


class ScaleGranularity(ABC):
    """What shares one scale; knows no matrix."""

    @abstractmethod
    def block(self, shape: Sequence[int]) -> Pair:
        """`[block_n, block_k]` for a matrix of `shape`, or each matrix of a stack `[E, N, K]`."""

    def grid(self, shape: Sequence[int]) -> BlockGrid:
        """The blocks of a matrix of `shape`, or of each matrix of a stack `[E, N, K]`. Raises as `sides_of`."""
        sides = sides_of(shape)
        return BlockGrid(sides, self.block(sides))


@dataclass(frozen=True)
class Blockwise(ScaleGranularity):
    """One scale for each block.

    `[N, K]` has scales of shape `[ceil(N / block_n), ceil(K / block_k)]`, `weight_scale_inv`.

    Raises:
        QuantizationError: a side that is no positive integer.
    """

    block_n: int = 128
    block_k: int = 128

    def __post_init__(self) -> None:
        if not all(type(size) is int and size > 0 for size in (self.block_n, self.block_k)):
            raise _no_block((self.block_n, self.block_k))

    @classmethod
    def of(cls, block_size: Sequence[int]) -> Blockwise:
        """From `weight_block_size`, as options, plans and callers have it."""
        if len(block_size) != 2:
            raise _no_block(block_size)
        return cls(*block_size)

    def block(self, shape: Sequence[int]) -> Pair:
        return self.block_n, self.block_k


@dataclass(frozen=True)
class PerChannel(ScaleGranularity):
    """One scale for each row of the local shard. `[N, K]` has scales of shape `[N, 1]`, `weight_scale`."""

    def block(self, shape: Sequence[int]) -> Pair:
        return 1, shape[-1]


def _no_block(block_size: Sequence[int]) -> QuantizationError:
    return QuantizationError(
        "weight_block_size",
        repr(block_size),
        "a block is [block_n, block_k], two positive integers",
        "Use [128, 128], which SGLang's kernels serve",
    )
