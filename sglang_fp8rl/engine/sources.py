"""Which sent tensor a loader is looking at: every view leads back to the name it was sent under."""

from __future__ import annotations

import bisect
import re
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch

_SCALE = re.compile(r"\.weight_scale(_inv)?$")


def weight_name_of(name: str) -> str:
    """The name of a scale's weight; any other name as it is."""
    return _SCALE.sub(".weight", name)


@dataclass(frozen=True)
class Source:
    """One tensor of an update, as it was sent.

    Attributes:
        weight_name: the name the model is given: the tensor's own, or for a scale its weight's.
        position: in the order they were sent.
    """

    name: str
    tensor: torch.Tensor
    weight_name: str
    position: int

    @property
    def is_scale(self) -> bool:
        return self.name != self.weight_name

    @property
    def address(self) -> int:
        return self.tensor.data_ptr()

    @property
    def end_address(self) -> int:
        return self.address + self.tensor.numel() * self.tensor.element_size()


class SourceIndex:
    """Watches the `(name, tensor)` pairs of an update go by and finds the name of a view.

    Models rename, split and stack while they load, and some hand experts to a thread pool, so
    neither the name nor the object survives until a parameter is written. The address does: a
    view lies inside the memory of the tensor it was taken from. What was made anew (a transpose
    that was copied, a fused weight taken apart) is put down to the pair that went by last.
    """

    def __init__(self) -> None:
        self.names: list[str] = []
        self.nbytes = 0
        self.consumed: set[str] = set()
        self._current: Source | None = None
        self._starts: list[int] = []
        self._sources: list[Source] = []
        # A tensor on `meta` has no address, but a storage (and this keeps it alive).
        self._on_meta: dict[int, Source] = {}
        self._lock = threading.Lock()

    def watch(
        self, weights: Iterable[tuple[str, torch.Tensor]]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Pass the pairs on, remembering them.

        A scale goes by under the name of its weight, so that it meets the same loader with the
        same shard or expert. Models may not know its own name: SGLang's Llama renames
        `weight_scale_inv` to `weight_scale` and then drops what it can't find.
        """
        for name, tensor in weights:
            with self._lock:
                source = Source(name, tensor, weight_name_of(name), len(self.names))
                self.names.append(name)
                self.nbytes += tensor.numel() * tensor.element_size()
                self._current = source
                self._remember(source)
            yield source.weight_name, tensor

    def count(self, name: str, tensor: torch.Tensor) -> None:
        """A tensor that goes to no loader."""
        self.names.append(name)
        self.nbytes += tensor.nbytes
        self.consumed.add(name)

    def _remember(self, source: Source) -> None:
        if source.tensor.device.type == "meta":
            self._on_meta[source.tensor.untyped_storage()._cdata] = source
            return
        # Tensors read from disk come and go, so an address may be used again: the newest wins.
        at = bisect.bisect_left(self._starts, source.address)
        if at < len(self._starts) and self._starts[at] == source.address:
            self._sources[at] = source
        else:
            self._starts.insert(at, source.address)
            self._sources.insert(at, source)

    def find(self, view: torch.Tensor) -> Source | None:
        """The sent tensor that `view` was taken from, and mark its name as used."""
        with self._lock:
            source = self._current
            if view.device.type == "meta":
                source = self._on_meta.get(view.untyped_storage()._cdata, source)
            else:
                address = view.data_ptr()
                if source is None or not source.address <= address < source.end_address:
                    at = bisect.bisect_right(self._starts, address) - 1
                    if at >= 0 and address < self._sources[at].end_address:
                        source = self._sources[at]
            if source is not None:
                self.consumed.add(source.name)
            return source

    def unused(self) -> list[str]:
        """Names that no parameter's loader was called for, in the order they were sent."""
        return [name for name in dict.fromkeys(self.names) if name not in self.consumed]

    def left(self) -> list[Source]:
        """What no parameter's loader was called for."""
        sent = (*self._sources, *self._on_meta.values())
        return [source for source in sent if source.name not in self.consumed]

    def forget_tensors(self) -> None:
        """Let go of the sender's memory; the names stay."""
        self._current, self._starts, self._sources = None, [], []
        self._on_meta = {}
