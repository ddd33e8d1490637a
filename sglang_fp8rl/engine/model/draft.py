"""Draft models: which of their weights came since their memory was released.

They are served as SGLang loads them, in high precision. A wrong one makes speculation slower and no output wrong, but
the status does not call a server whole that drafts with rubbish.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch

from .parameters import loader_of, part_of, set_loader

_drafts: weakref.WeakSet[Draft] = weakref.WeakSet()  # of this process, which serves one model


class Draft:
    """One draft model, whose loads are followed.

    Side effects on the host: replaces each parameter's `weight_loader`, and leaves itself as `model.fp8rl_draft`.

    Attributes:
        lost: parts of parameters that loads had brought, and that have not come since.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self._loaders = {name: self._followed(name, one) for name, one in model.named_parameters()}
        self._loaded: set[tuple[str, tuple]] = set()
        self.lost: set[tuple[str, tuple]] = set()
        model.fp8rl_draft = self  # type: ignore[assignment]
        _drafts.add(self)

    def _followed(self, name: str, parameter: Any) -> Any:
        native = loader_of(parameter)

        def weight_loader(given: Any, loaded: torch.Tensor, *args: Any, **kwargs: Any) -> None:
            native(given, loaded, *args, **kwargs)
            part = name, part_of(args, kwargs)
            self._loaded.add(part)
            self.lost.discard(part)

        set_loader(parameter, weight_loader)
        return weight_loader

    def lose(self) -> None:
        """Its memory is gone, but for parameters that are the target's by now."""
        held = {n: getattr(one, "weight_loader", None) for n, one in self._model.named_parameters()}
        own = {name for name, loader in self._loaders.items() if held.get(name) is loader}
        self.lost = {part for part in self._loaded if part[0] in own}


def lose_drafts() -> None:
    """The memory of all draft models is gone."""
    for draft in _drafts:
        draft.lose()


def lost_of_drafts() -> list[str]:
    """Name the parameters of draft models that have not come since."""
    return sorted({name for draft in _drafts for name, _ in draft.lost})
