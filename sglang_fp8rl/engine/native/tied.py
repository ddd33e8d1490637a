"""Tensors for a parameter that another one writes: a head that is tied to the embedding, a draft model's copy.

They are looked at and not stored: in the end they have to be what is served (`ledger/sent_twice.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from ...errors import RefitError
from ..arrival.sent_tensors import SourceIndex
from ..ledger.ledger import Ledger
from ..model.landings import Known, why_left_out
from ..model.parameters import ModelMemory, Target
from .call import Call
from .checks import check_dtype, check_shape
from .observer import Observer

_OF_A_DRAFT = (
    "a draft model shares this parameter, and the served model's own tensor is what is stored in it"
)


def noted(
    weights: Iterable[tuple[str, torch.Tensor]],
    call: Call,
    ledger: Ledger,
    rows: Sequence[Mapping[str, str]],
) -> Iterator[tuple[str, torch.Tensor]]:
    """Pass on what is sent; what the model ties to another tensor is noted as it goes by.

    Args:
        rows: of `left_out`, with the name that it computes with as `equals`.
    """
    for position, (name, tensor) in enumerate(weights):
        row = why_left_out(name, rows) if name not in ledger.names.known else {}
        if row:
            call.tied[position] = row["equals"]
            note_tied(ledger, call, name, tensor, row["equals"])
        yield name, tensor


def note_tied(ledger: Ledger, call: Call, name: str, tensor: torch.Tensor, other: str) -> None:
    """A tensor came that is the same as the `other` one: it is held against what is served in the end."""
    rule = f"this model ties it to {other}, and computes with that one"
    known = ledger.names.known[other]
    if tuple(tensor.shape) == known.shape:
        ledger.sent_twice.note(name, _parts(tensor, known), ledger.stamp, rule)
        return
    call.errors[name] = (
        f"{name}: shape {tuple(tensor.shape)}; {rule}, of shape {known.shape}. Leave it out"
    )


def _parts(tensor: torch.Tensor, known: Known) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """What this rank holds of a tensor that is sent like a known one, each with where it lies."""
    for landing in known.landings:
        for box, region in zip(landing.boxes, landing.regions, strict=True):
            if box is not None and region is not None:
                served = landing.target.parameter.data[region.slices]
                yield tensor[box.slices], served.reshape(box.shape)


def note_draft_write(
    ledger: Ledger,
    target: Target,
    native: Any,
    loaded: torch.Tensor,
    args: tuple,
    kwargs: dict,
    stamp: int,
) -> None:
    """Note a loader call of a draft model: `native(parameter, loaded, *args, **kwargs)`, of a shared parameter.

    SGLang hands the same tensors to both models' loads (`set_embed_and_head`), in an order of its version's.

    Args:
        stamp: of the served model's own call of the same request, which may be still to come.

    Raises:
        RefitError: it can't be compared with what is served.
    """
    name, parameter = target.name, target.parameter
    check_dtype(target, name, loaded)
    check_shape(target, native, name, loaded, args, kwargs)
    nothing = ModelMemory(torch.nn.Module(), ())
    found = Observer(
        SourceIndex(), lambda: nothing, lambda *_: None, lambda _: None, {}, stores=True
    ).writes_of(lambda one: native(one, loaded, *args, **kwargs), target, loaded.dtype)
    if target.is_fp8 or found.other:
        value = f"written by a draft model's load, {found.other or 'and served in FP8'}"
        remedy = "Send the update with selector='target', or add the module to ignored_layers."
        raise RefitError(name, value, _OF_A_DRAFT, remedy)
    parts = [
        (one.source, one.destination(parameter)) for one in found.writes if one.source is not None
    ]
    ledger.sent_twice.note(name, parts, stamp, _OF_A_DRAFT)
