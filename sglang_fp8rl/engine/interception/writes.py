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
from typing import Any

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
            return RecordedWrite(self, 0, (), ())
        if (
            source.dim() == 0
            or source.dtype != loaded_weight.dtype
            or (source.untyped_storage()._cdata != loaded_weight.untyped_storage()._cdata)
        ):
            return None
        offset = int(source.storage_offset() - loaded_weight.storage_offset())
        shape, stride = tuple(source.shape), tuple(source.stride())
        return RecordedWrite(replace(self, source=None), offset, shape, stride)

    def destination(self, parameter: torch.Tensor) -> torch.Tensor:
        """The view of the real parameter that this write lands in."""
        return parameter.data.as_strided(
            self.shape, self.stride, parameter.data.storage_offset() + self.offset
        )


@dataclass(frozen=True)
class RecordedWrite:
    """A write whose source is known by its place in the tensor that is sent, not by its memory."""

    write: Write
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    def repeat(self, loaded_weight: torch.Tensor) -> Write:
        """The same write, from a tensor of the recorded shape and strides."""
        if not self.shape:
            return self.write
        offset = loaded_weight.storage_offset() + self.offset
        source = loaded_weight.as_strided(self.shape, self.stride, offset)
        return replace(self.write, source=source)


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
