"""What a native `weight_loader` writes, and where: its final copies, seen from inside.

Every loader ends in `narrow(...)` and `copy_` into the parameter. It is run on a *stand-in*: a
`meta` parameter with the real one's class, attributes, shape and strides, but the dtype of what
was sent (SGLang's column-parallel loader refuses to copy BF16 into FP8 before it tries). Copies
into the stand-in are caught and returned as writes; nothing is copied. `TorchDispatchMode` is per
thread, and nothing shared is swapped, so loaders may run in a thread pool.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from struct import Struct
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from .region import Region, region_of

aten = torch.ops.aten
_FILLS = {aten.zero_.default: 0.0}
_SCALAR_FILLS = {aten.fill_.Scalar, aten.fill_.Tensor}
_WRITES = {aten.copy_.default, *_FILLS, *_SCALAR_FILLS}


@dataclass(frozen=True)
class Write:
    """One intercepted copy (or fill) into a parameter.

    Attributes:
        source: what is to be written: a view of what was sent, or a tensor the loader made; None
            for a fill.
        fill: the value, where a loader fills instead of copying (the tail of a padded buffer).
        offset, shape, stride: the destination view, in elements of the parameter's storage.
        region: the box that view covers, or None if it is not a box.
    """

    source: torch.Tensor | None
    fill: float
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    region: Region | None

    def taken_from(self, loaded_weight: torch.Tensor) -> RecordedWrite | None:
        """This write as one that can be repeated for another tensor of the same shape and strides.

        None if the source is not a plain view of what was sent: a loader that made a tensor of
        its own has to run again.
        """
        source = self.source
        if source is None:
            return RecordedWrite(self, 0, (), (), NO_MATRIX)
        if (
            source.dim() == 0
            or source.dtype != loaded_weight.dtype
            or (source.untyped_storage()._cdata != loaded_weight.untyped_storage()._cdata)
        ):
            return None
        offset = int(source.storage_offset() - loaded_weight.storage_offset())
        shape, stride = tuple(source.shape), tuple(source.stride())
        numbers = _matrix_numbers(self, offset, shape, stride)
        return RecordedWrite(replace(self, source=None), offset, shape, stride, numbers)

    def destination(self, parameter: torch.Tensor) -> torch.Tensor:
        """The view of the real parameter that this write lands in."""
        return parameter.data.as_strided(
            self.shape, self.stride, parameter.data.storage_offset() + self.offset
        )


class MatrixNumbers(NamedTuple):
    """A write of a matrix with contiguous rows into one matrix of a parameter; elements, no bytes.

    Attributes:
        offset, row_stride: of the source, in the tensor that is sent.
        to_offset, to_row_stride: of the destination, in the parameter.
        dims: of the parameter, 2 or 3; 0 where the write is not of this kind.
        matrix, row, column: where it lands.
    """

    offset: int
    row_stride: int
    to_offset: int
    to_row_stride: int
    dims: int
    matrix: int
    row: int
    column: int
    rows: int
    cols: int

    @property
    def packed(self) -> bytes:
        """As int64: many of them, joined, are the rows of an array."""
        return _PACKED.pack(*self)


_PACKED = Struct(f"{len(MatrixNumbers._fields)}q")
NO_MATRIX = MatrixNumbers(*[0] * len(MatrixNumbers._fields)).packed


@dataclass(frozen=True)
class RecordedWrite:
    """A write whose source is known by its place in the tensor that is sent, not by its memory.

    Attributes:
        offset, shape, stride: of the source, in elements of the tensor that is sent.
        numbers: the same and its destination, where both are plain matrices (`MatrixNumbers.packed`).
    """

    write: Write
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    numbers: bytes

    def repeat(self, loaded_weight: torch.Tensor) -> Write:
        """The same write, from a tensor of the recorded shape and strides."""
        if not self.shape:
            return self.write
        offset = loaded_weight.storage_offset() + self.offset
        source = loaded_weight.as_strided(self.shape, self.stride, offset)
        return replace(self.write, source=source)


def _matrix_numbers(
    write: Write, offset: int, shape: tuple[int, ...], stride: tuple[int, ...]
) -> bytes:
    region = write.region
    if (
        region is None
        or len(shape) != 2
        or write.shape != shape
        or not shape[0] * shape[1]
        or stride[1] != 1
        or write.stride[1] != 1
        or len(region.start) not in (2, 3)
        or region.shape[-2:] != shape
        or (len(region.shape) == 3 and region.shape[0] != 1)
    ):
        return NO_MATRIX
    dims, (row, column), (rows, cols) = len(region.start), region.start[-2:], shape
    matrix = region.start[0] if dims == 3 else 0
    places = (offset, stride[0], write.offset, write.stride[0])
    return MatrixNumbers(*places, dims, matrix, row, column, rows, cols).packed


class _CatchCopies(TorchDispatchMode):
    """Collects copies and fills into one meta stand-in instead of doing them."""

    def __init__(self, stand_in: torch.Tensor) -> None:
        super().__init__()
        self._storage = stand_in.untyped_storage()._cdata
        self._parameter_shape = tuple(stand_in.shape)
        self.writes: list[Write] = []

    def _is_ours(self, tensor: Any) -> bool:
        return (
            isinstance(tensor, torch.Tensor)
            and tensor.device.type == "meta"
            and tensor.untyped_storage()._cdata == self._storage
        )

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if args and self._is_ours(args[0]) and not args[0].numel():
            # The padding of a vocabulary that needs none.
            return args[0] if func in _WRITES else func(*args, **kwargs)
        if func is aten.copy_.default and self._is_ours(args[0]):
            source = args[1].expand(args[0].shape) if args[1].shape != args[0].shape else args[1]
            self.writes.append(self._write(args[0], source, 0.0))
            return args[0]
        if func in _FILLS and self._is_ours(args[0]):
            self.writes.append(self._write(args[0], None, _FILLS[func]))
            return args[0]
        if func in _SCALAR_FILLS and self._is_ours(args[0]):
            self.writes.append(self._write(args[0], None, float(args[1])))
            return args[0]
        if func is aten._to_copy.default and str(kwargs.get("device", "")).startswith("meta"):
            # `loaded_weight.to(param.device)`: on the real parameter this is the same device.
            kwargs = {key: value for key, value in kwargs.items() if key != "device"}
            if kwargs.get("dtype") in (None, args[0].dtype):
                return args[0]
            return func(*args, **kwargs)
        return func(*args, **kwargs)

    def _write(self, destination: torch.Tensor, source: torch.Tensor | None, fill: float) -> Write:
        offset, shape = int(destination.storage_offset()), tuple(destination.shape)
        stride = tuple(destination.stride())
        region = region_of(offset, shape, stride, self._parameter_shape)
        return Write(source, fill, offset, shape, stride, region)


def make_stand_in(parameter: torch.nn.Parameter, dtype: torch.dtype) -> torch.nn.Parameter:
    """A meta parameter that a loader can't tell from `parameter`, but for dtype and device."""
    data = torch.empty_strided(
        tuple(parameter.shape), parameter.stride(), dtype=dtype, device="meta"
    )
    stand_in = torch.Tensor._make_subclass(type(parameter), data, False)
    stand_in.__dict__.update(parameter.__dict__)
    return stand_in


def writes_of(
    loader: Callable[..., Any],
    stand_in: torch.nn.Parameter,
    loaded_weight: torch.Tensor,
    args: tuple,
    kwargs: dict,
) -> list[Write]:
    """Run `loader(stand_in, loaded_weight, ...)` and return what it would have written.

    An empty list is an answer: this rank holds nothing of the tensor (an expert of another rank).
    """
    with _CatchCopies(stand_in) as caught:
        loader(stand_in, loaded_weight, *args, **kwargs)
    return caught.writes
