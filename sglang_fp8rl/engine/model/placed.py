"""Tensors that a module binds anew get their values in the memory they had: CUDA graphs hold its address."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

import torch

from ...errors import RefitError
from ..interception import storage_of
from .parameters import held_tensors

Modules = Mapping[str, torch.nn.Module]
Names = dict[tuple[int, str], "Name"]


class Name(NamedTuple):
    """A name of a module, and what it stood for: the object, and the memory that it had."""

    prefix: str
    owner: dict[str, Any]
    attribute: str
    tensor: torch.Tensor
    data: torch.Tensor

    @property
    def place(self) -> str:
        return f"{self.prefix}.{self.attribute}" if self.prefix else self.attribute

    def bind(self) -> None:
        """Have the name stand for that object in that memory again."""
        mine = self.tensor
        if (mine.data_ptr(), mine.shape) != (self.data.data_ptr(), self.data.shape):
            mine.data = self.data
        self.owner[self.attribute] = self.tensor

    def stands_for(self, tensor: torch.Tensor) -> bool:
        """Whether this is the same object, in the same memory."""
        return self.tensor is tensor and _address(self.data) == _address(tensor)

    def put_back(self, new: torch.Tensor) -> None:
        """Copy the new value into the old memory, and bind that again."""
        old = self.data
        if not _fits(new, old):
            raise _changed(
                self,
                f"{new.dtype} of shape {tuple(new.shape)} instead of {old.dtype} of shape {tuple(old.shape)}",
            )
        with torch.no_grad():
            old.copy_(new)
        self.bind()


def owners_of(module: torch.nn.Module) -> tuple[dict[str, Any], ...]:
    """Where a module holds tensors by name."""
    return vars(module), module._buffers, module._parameters


def names_of(modules: Modules) -> Names:
    """Every tensor that a module has a name for, and the memory that it lies in."""
    return {(id(one[1]), one[2]): Name(*one, one[3].data) for one in _named_tensors(modules)}


def _named_tensors(modules: Modules) -> Iterator[tuple[str, dict[str, Any], str, torch.Tensor]]:
    for prefix, module in modules.items():
        for owner in owners_of(module):
            for attribute, value in owner.items():
                if _IS_TENSOR[value.__class__]:
                    yield prefix, owner, attribute, value


class _IsTensor(dict[type, bool]):
    """Whether values of a type are tensors. A model has 20,000 attributes, and each refit looks at all of them."""

    def __missing__(self, kind: type) -> bool:
        found = self[kind] = issubclass(kind, torch.Tensor)
        return found


_IS_TENSOR = _IsTensor()


@contextmanager
def kept_in_place(modules: Modules, *, puts_back: bool) -> Iterator[list[tuple[str, torch.Tensor]]]:
    """Whatever tensor a module binds anew in here has its value in the old memory, if `puts_back`.

    Yields:
        a list that has, afterwards, `(module.attribute, tensor)` of all that was bound anew.

    Raises:
        RefitError: the new value does not fit there.
    """
    before = names_of(modules)
    moved: list[tuple[str, torch.Tensor]] = []
    try:
        yield moved
    except BaseException:
        with suppress(RefitError):  # the first error is the one to tell
            moved += _moved(modules, before, puts_back=puts_back)
        raise
    moved += _moved(modules, before, puts_back=puts_back)


def _moved(
    modules: Modules, before: Names, *, puts_back: bool
) -> Iterator[tuple[str, torch.Tensor]]:
    # Nearly always nothing has moved: no names are made for a look at what has not.
    gone, moved = dict(before), []
    for one in _named_tensors(modules):
        old = gone.pop((id(one[1]), one[2]), None)
        if old is None or not old.stands_for(one[3]):
            moved.append((old, Name(*one, one[3].data)))
    yield from ((new.place, new.data) for _, new in moved)
    if not puts_back:
        return
    try:
        if gone:
            raise _changed(next(iter(gone.values())), "no tensor any more")
        again = [(old, new) for old, new in moved if old is not None]
        if again:
            _check_apart(modules, before, names_of(modules), again)
        for old, new in again:
            old.put_back(new.data)
    except RefitError:
        for name in before.values():  # or the next update would find it as it is now
            name.bind()
        raise


def _check_apart(
    modules: Modules, before: Names, after: Names, again: list[tuple[Name, Name]]
) -> None:
    """Check that a value which goes back into the memory it had overwrites no other name's.

    Raises:
        RefitError: it lies in a storage that a name had before, or that a new name has, which would keep it; or
            it leaves a storage that not every name moved from by as much to the same other one, or that something
            inside a container still has.
    """
    named = {one.place for one in after.values()}
    held = held_tensors(modules.items())
    contained = {storage_of(one.tensor) for one in held if one.place not in named}
    is_new = {storage_of(one.data) for key, one in after.items() if key not in before}
    moved_to: defaultdict[int, set[tuple[int, int]]] = defaultdict(set)
    for key, one in before.items():
        data = after[key].data
        by = data.data_ptr() - one.data.data_ptr()
        moved_to[storage_of(one.data)].add((storage_of(data), by))
    for old, new in again:
        was, now = storage_of(old.data), storage_of(new.data)
        if was == now and old.data.storage_offset() == new.data.storage_offset():
            continue
        if len(moved_to[was]) > 1 or now in moved_to or now in is_new or was in contained:
            raise _changed(old, "in memory that another name has, or had")


# Kimi-K3's: arguments of the kernels that decode a token of its delta attention, and norms times projections of its
# attention residuals, by dtype, which are made where there are none.
_ARGUMENTS = ("_k3_fused_decode_args", "_k3_hip_fused_decode_args", "_attn_res_cw_cache")


class KernelArguments(NamedTuple):
    """A tuple or cache of tensors and numbers that a derivation makes, and a captured graph reads: known by its name.

    Any tuple may be shared, or half made, or written by something else: no rule told those from arguments of a kernel.
    """

    owner: dict[str, Any]
    attribute: str
    held: tuple[Any, ...] | dict[Any, Any]

    def forget(self) -> None:
        """Have a derivation make a cache again, which it would find full."""
        if isinstance(self.held, dict):
            self.owner[self.attribute] = None

    def put_back(self) -> None:
        """Copy what was bound anew into the tensors that were there, and bind these again; what is not alike stays."""
        new = self.owner.get(self.attribute)
        if new is None and isinstance(self.held, dict):  # another one's
            self.owner[self.attribute] = self.held
        if new is self.held or type(new) is not type(self.held):
            return
        before, after = _by_key(self.held), _by_key(new)
        if before.keys() != after.keys():
            return
        pairs = [(old, after[key]) for key, old in before.items()]
        if not all(_are_alike(old, one) for old, one in pairs):
            return
        with torch.no_grad():
            for old, one in pairs:  # at one address it is (a view of) a weight
                if isinstance(old, torch.Tensor) and _address(old) != _address(one):
                    old.copy_(one)
        self.owner[self.attribute] = self.held


def _by_key(held: Any) -> dict[Any, Any]:
    return held if isinstance(held, dict) else dict(enumerate(held))


def _are_alike(old: Any, new: Any) -> bool:
    if type(old) is not torch.Tensor or type(new) is not torch.Tensor:
        return type(old) is type(new) and bool(old == new)
    return _fits(new, old)


def _fits(new: torch.Tensor, old: torch.Tensor) -> bool:
    """Whether the values of one can go into the memory of the other."""
    return (new.shape, new.dtype, new.device) == (old.shape, old.dtype, old.device)


def kernel_arguments(modules: Modules) -> list[KernelArguments]:
    """Those that these modules have now."""
    return [
        KernelArguments(vars(module), name, vars(module)[name])
        for module in modules.values()
        for name in _ARGUMENTS
        if type(vars(module).get(name)) in (tuple, dict)
    ]


def _address(tensor: torch.Tensor) -> tuple[int, int]:
    # On `meta`, and of nothing, every address is 0.
    return tensor.data_ptr(), 0 if tensor.data_ptr() else storage_of(tensor)


def _changed(old: Name, what: str) -> RefitError:
    return RefitError(
        old.place,
        what,
        "a derived weight keeps its shape, dtype and address, for captured graphs use it",
        "Restart the server on these weights.",
    )
