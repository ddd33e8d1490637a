"""How a weight may be held in FP8: what shares one scale, which scales belong to a part of it, and their names.

Pure integers and text.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from ..errors import Fp8RlError, QuantizationError

if TYPE_CHECKING:
    import numpy as np

Pair = tuple[int, int]
# What shares one scale, [block_n, block_k]; None is all of that side.
BlockSize = Sequence[int | None]
Count = TypeVar("Count", int, "np.ndarray")


def ceil_div(whole: Count, part: Count | int) -> Count:
    """`whole / part`, rounded up."""
    return -(-whole // part)


@dataclass(frozen=True)
class BlockGrid:
    """One matrix `[N, K]` cut into blocks `[block_n, block_k]` with a scale each; the last of a side may be smaller."""

    shape: Pair
    block: Pair

    @classmethod
    def of(cls, shape: Sequence[int], block_size: BlockSize, name: str = "weight") -> BlockGrid:
        """The blocks of a matrix of `shape`, or of each of a stack `[E, N, K]`. Raises `QuantizationError` for what has no
        rows, or a block that is none; `name` is the tensor's."""
        if len(shape) < 2:
            raise QuantizationError(
                name,
                f"shape {list(shape)}",
                "scales belong to blocks of a matrix [N, K], and it has fewer than two dimensions",
                "Send the matrix, or what is served of it in high precision",
            )
        sides = shape[-2], shape[-1]
        given = [side if size is None else size for size, side in zip(block_size, sides)]  # noqa: B905
        if len(block_size) != 2 or not all(type(one) is int and one > 0 for one in given):
            raise QuantizationError(
                "weight_block_size",
                repr(block_size),
                "a block is [block_n, block_k], two positive integers",
                "Use [128, 128], which SGLang's kernels serve",
            )
        return cls(sides, (given[0], given[1]))

    @property
    def scale_shape(self) -> Pair:
        return ceil_div(self.shape[0], self.block[0]), ceil_div(self.shape[1], self.block[1])

    def is_whole(self, start: Sequence[int], shape: Sequence[int]) -> bool:
        """Whether a box, of so many rows and columns (any, or none) from `start` on, consists of whole blocks, so that its
        scales depend on nothing outside of it."""
        # Asked for each of 18,000 writes: no loop, no generator.
        (row, column), (height, width) = start, shape
        block_n, block_k = self.block
        bottom, right = row + height, column + width
        return not (
            (height and (row % block_n or (bottom % block_n and bottom != self.shape[0])))
            or (width and (column % block_k or (right % block_k and right != self.shape[1])))
        )

    def scales_of(
        self,
        start: Sequence[int],
        shape: Sequence[int],
        *,
        name: str = "weight",
        value: str = "",
        error: type[Fp8RlError] = QuantizationError,
        remedy: str = "Send this tensor in BF16 or FP32 and let the engine quantize its own shard.",
    ) -> tuple[slice, slice]:
        """The scales of a box (as of `is_whole`), as slices of scales of `scale_shape`.

        Raises an `error` with that `name`, `value` and `remedy` if the box starts or ends inside a block: that block's
        scale depends on values that another rank holds, so no rank can be given its own part of it.
        """
        if not self.is_whole(start, shape):
            rows, columns = (f"{at}:{at + size}" for at, size in zip(start, shape, strict=True))
            raise error(
                name,
                value or f"shard [{rows}, {columns}] of {list(self.shape)}",
                f"it starts or ends inside a block of {list(self.block)}, so no scale is its alone",
                remedy,
            )
        rows_of, columns_of = (
            # Rounded up: an empty box may start behind the last block, which may be short.
            slice(ceil_div(at, step), ceil_div(at + size, step))
            for at, size, step in zip(start, shape, self.block, strict=True)
        )
        return rows_of, columns_of

    def strips(self, elements: int) -> Iterator[tuple[slice, slice]]:
        """Strips of about so many `elements`, of one row of blocks at least: their rows, and those of their scales."""
        rows, cols = self.shape
        height = max(1, elements // (self.block[0] * cols))
        for first in range(0, self.scale_shape[0], height):
            end = first + height
            yield slice(first * self.block[0], min(end * self.block[0], rows)), slice(first, end)


class Format:
    """How a weight is held in FP8: codes in e4m3, and an FP32 scale for each block of a matrix. Knows no matrix."""

    name: str  # as options have it, and the plan as a scheme
    block_size: BlockSize  # what shares one scale
    # What the name of a weight has behind it for its scale: on the wire, and in the module, for SGLang's kernels.
    scale_suffix: str
    takes_any_shape = False  # or a shard that is held so consists of whole blocks
    # What SGLang is told, where its own code for blocks allocates, loads and multiplies.
    weight_block_size: list[int] | None = None

    def grid(self, shape: Sequence[int]) -> BlockGrid:
        return BlockGrid.of(shape, self.block_size)

    def scale_name(self, weight: str) -> str:
        return weight + self.scale_suffix

    def sent_scale_shapes(self, shape: Sequence[int]) -> list[tuple[int, ...]]:
        """Shapes that the scale of a sent weight of `shape` may have; the first is the plan's."""
        return [self.grid(shape).scale_shape]


FORMATS: dict[str, Format] = {}  # by name


def scale_suffixes() -> tuple[str, ...]:
    """What a name may have behind its weight's: a scale may come under the name of any format."""
    return tuple(one.scale_suffix for one in FORMATS.values())


def weight_name_of(name: str) -> str:
    """The name of a scale's weight; any other name as it is."""
    if name.endswith("weight"):  # asked of 18,000 names
        return name
    weights = (name.removesuffix(one) for one in scale_suffixes() if name.endswith(f".weight{one}"))
    return next(weights, name)
