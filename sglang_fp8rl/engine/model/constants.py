"""What a model holds that no update sends: kept on the CPU while the memory of the weights is released."""

from __future__ import annotations

import torch

from ..interception import storage_of
from .derived_weights import DerivedWeights


class Constants:
    """Of one model, whose buffers SGLang keeps itself; what plain objects hold was not made with the model."""

    def __init__(self, model: torch.nn.Module, derived: DerivedWeights) -> None:
        self._model, self._derived = model, derived
        self._kept: list[tuple[torch.Tensor, torch.Tensor]] = []

    def keep(self) -> None:
        """Memory is about to be given back: look while it is there, and copy what is made of no weight."""
        copies = self._derived.kept_copies
        copies.look()
        buffers = {storage_of(one) for one in self._model.buffers()}
        self._kept = [
            (one.tensor.detach(), one.tensor.detach().to("cpu", copy=True))
            for one in copies.others()
            if isinstance(one.holder, torch.nn.Module) and storage_of(one.tensor) not in buffers
        ]

    def put_back(self) -> None:
        """Give memory that came back what `keep` copied."""
        for one, kept in self._kept:
            one.copy_(kept)
        self._kept = []
        self._derived.kept_copies.number_again()
