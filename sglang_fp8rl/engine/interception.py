"""Operations of torch, seen one by one; the copies into the model among them, as values.

Every `weight_loader` ends in `narrow(...)` and `copy_` into the parameter. It is run on a *stand-in*: a
`meta` parameter with the real one's class, attributes, shape and strides, but the dtype of what
was sent (SGLang's column-parallel loader refuses to copy BF16 into FP8 before it tries). Copies
into the stand-in are caught by the observer; nothing is copied, and nothing shared is swapped, so
loaders may run in a thread pool.
"""

from __future__ import annotations

import functools
import math
import operator
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode

_MODES = torch._C.DispatchKeySet(torch._C.DispatchKey.Python)


class watched(TorchDispatchMode):
    """In this context `see(operation, args, kwargs)` is called in place of every operation of the thread.

    Operations within `see` are not seen again.
    """

    def __init__(self, see: Callable[[Any, tuple, dict], Any]) -> None:
        super().__init__()
        self._see = see

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        return self._see(func, args, kwargs or {})


@contextmanager
def each_new_thread(enter: Callable[[], object]) -> Iterator[None]:
    """In here, every thread that is started calls `enter` before anything else.

    A dispatch mode is a thread's own, and so are the threads of pools that models load with. Python
    offers new threads a profile function; this one does its work at the first event and goes.
    """

    def at_first_event(*_: Any) -> None:
        sys.setprofile(before)
        enter()

    before = threading.getprofile()
    threading.setprofile(at_first_event)
    try:
        yield
    finally:
        threading.setprofile(before)


def stream_lane(device: torch.device) -> Callable[[], AbstractContextManager[None]]:
    """A context in which any thread queues on the stream of this device that the calling thread has now.

    Models of DeepSeek's family hand their experts to a thread pool. A new thread has the default stream
    (and the first device) as its own, while the scheduler works on another stream, and reads there
    whether what was cast was finite: without waiting, it would read before the cast has run.
    """
    module: Any = torch.get_device_module(device)
    stream, thread = module.current_stream(device), threading.get_ident()

    def lane() -> Any:
        return nullcontext() if threading.get_ident() == thread else module.stream(stream)

    return lane


def unwatched() -> AbstractContextManager[None]:
    """In this context operations are ours, and cost what they always do."""
    return torch._C._ExcludeDispatchKeyGuard(_MODES)


class OperationKind(NamedTuple):
    """What an operation does, as its schema says.

    Attributes:
        is_view: whether its results are views of its arguments, and nothing is written.
        written: the arguments that it writes, by position and name.
    """

    is_view: bool
    written: tuple[tuple[int, str], ...]

    def written_of(self, args: tuple, kwargs: dict) -> list[Any]:
        """Those that it writes, of these; `out` is given by name."""
        found = [args[at] if at < len(args) else kwargs.get(name) for at, name in self.written]
        return [one for one in found if one is not None]


@functools.cache
def kind_of(func: Any) -> OperationKind:
    schema = func._schema
    written = tuple(
        (at, one.name)
        for at, one in enumerate(schema.arguments)
        if one.alias_info is not None and one.alias_info.is_write
    )
    is_view = not written and any(one.alias_info is not None for one in schema.returns)
    return OperationKind(is_view, written)


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Those with memory of their own, in arguments or results of an operation."""
    if isinstance(value, torch.Tensor):
        if value.layout is torch.strided:
            yield value
    elif isinstance(value, (dict, list, tuple)):
        for one in value.values() if isinstance(value, dict) else value:
            yield from tensors_in(one)


class Region(NamedTuple):
    """A box of a parameter. A tuple, as 18,000 of them are looked up at once.

    Attributes:
        start: first index along each dimension.
        shape: size along each dimension.
    """

    start: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def slices(self) -> tuple[slice, ...]:
        """Index the box by these."""
        return tuple(slice(at, at + n) for at, n in zip(self.start, self.shape, strict=True))

    def overlaps(self, other: Region) -> bool:
        return all(
            a < b + m and b < a + n
            for a, n, b, m in zip(self.start, self.shape, other.start, other.shape, strict=True)
        )

    def lies_in(self, shape: Sequence[int]) -> bool:
        ends = [at + n for at, n in zip(self.start, self.shape, strict=True)]
        return len(ends) == len(shape) and all(map(operator.le, ends, shape))

    def __str__(self) -> str:
        sides = zip(self.start, self.shape, strict=True)
        return f"[{', '.join(f'{first}:{first + size}' for first, size in sides)}]"


def region_of(
    offset: int, shape: tuple[int, ...], stride: tuple[int, ...], parameter_shape: tuple[int, ...]
) -> Region | None:
    """The box that a view of a contiguous parameter covers; None if the view is not a box.

    Args:
        offset: elements from the parameter's start to the view's first one.
        shape, stride: of the view, in elements.
    """
    strides = [1] * len(parameter_shape)
    for dim in range(len(parameter_shape) - 2, -1, -1):
        strides[dim] = strides[dim + 1] * parameter_shape[dim + 1]
    start, rest = [], offset
    for step in strides:
        start.append(rest // step if step else 0)
        rest -= start[-1] * step
    sizes = [1] * len(parameter_shape)
    for size, step in zip(shape, stride, strict=True):
        if size == 1:
            continue
        if step not in strides:
            return None
        # Dimensions of size 1 share a stride with their neighbour: take the one that is long.
        dim = max((d for d, s in enumerate(strides) if s == step), key=lambda d: parameter_shape[d])
        if sizes[dim] != 1:
            return None
        sizes[dim] = size
    region = Region(tuple(start), tuple(sizes))
    return region if region.lies_in(parameter_shape) else None


def box_of(offset: int | None, view: torch.Tensor, shape: tuple[int, ...]) -> Region | None:
    """The box of a contiguous tensor that a view covers in the same order; None if it turns, or is no box.

    Args:
        offset: elements from the tensor's start to the view's; None if it is no view of it.
        shape: of the tensor.
    """
    if offset is None or not is_row_major(view.shape, view.stride()):
        return None
    return region_of(offset, tuple(view.shape), view.stride(), shape)


def is_row_major(shape: Sequence[int], stride: Sequence[int]) -> bool:
    steps = [step for size, step in zip(shape, stride, strict=True) if size != 1]
    return steps == sorted(steps, reverse=True)


class Write(NamedTuple):
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

    def destination(self, parameter: torch.Tensor) -> torch.Tensor:
        """The view of the real parameter that this write lands in."""
        data = parameter.data
        return data.as_strided(self.shape, self.stride, data.storage_offset() + self.offset)

    def values(self, parameter: torch.Tensor) -> torch.Tensor:
        """What is written: the source, or the fill (FP32, FP64 of integers) on the parameter's device."""
        if self.source is not None:
            return self.source
        dtype = torch.float32 if parameter.is_floating_point() else torch.float64
        return torch.full(self.shape, self.fill, dtype=dtype, device=parameter.device)


def extent_of(tensor: torch.Tensor) -> tuple[int, int]:
    """The first element of its storage that a tensor touches, and the one behind the last."""
    first = int(tensor.storage_offset())
    if tensor.is_contiguous() or not tensor.numel():
        return first, first + tensor.numel()
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    return first, first + 1 + sum((size - 1) * step for size, step in steps)


def span_of(tensor: torch.Tensor) -> tuple[int, int]:
    """The address of the first byte that a tensor touches, and the one behind the last."""
    first, last = extent_of(tensor)
    start = tensor.data_ptr()
    return start, start + (last - first) * tensor.element_size()


def offset_within(span: tuple[int, int], view: torch.Tensor) -> int | None:
    """Elements from the start of a span of memory to that of a view; None unless all of that lies in it."""
    (start, end), (first, last) = span, span_of(view)
    return (first - start) // view.element_size() if start <= first and last <= end else None


def write_into(
    whole: torch.Tensor, view: torch.Tensor, source: torch.Tensor | None, fill: float
) -> Write:
    """A copy of `source` (or the fill) into `view`, which lies in the memory of `whole`."""
    offset = int(view.storage_offset()) - int(whole.storage_offset())
    shape, stride = tuple(view.shape), tuple(view.stride())
    is_box = whole.is_contiguous()
    region = region_of(offset, shape, stride, tuple(whole.shape)) if is_box else None
    return Write(source, fill, offset, shape, stride, region)


def make_stand_in(parameter: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A meta parameter that a loader can't tell from `parameter`, but for dtype and device."""
    shape, stride = tuple(parameter.shape), parameter.stride()
    data = torch.empty_strided(shape, stride, dtype=dtype, device="meta")
    stand_in = torch.Tensor._make_subclass(type(parameter), data, False)
    stand_in.__dict__.update(parameter.__dict__)
    return stand_in


def storage_of(tensor: torch.Tensor) -> int:
    """A number for the storage of a tensor, also on `meta`; no two that live have the same."""
    return tensor.untyped_storage()._cdata
