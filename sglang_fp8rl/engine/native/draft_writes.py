"""Writes of a draft model's load into a parameter that it shares with the served model (`set_embed_and_head`).

SGLang hands the same tensors to both loads, in an order of its version's. The served model's own load stores them; a
draft's write is looked at, and in the end it has to be what is served.
"""

from __future__ import annotations

from typing import Any

import torch

from ...errors import RefitError
from ..arrival.sent_tensors import SourceIndex
from ..interception import make_stand_in
from ..model.parameters import ModelMemory, Target
from ..report.report import RefitReport
from .checks import check_dtype, check_shape
from .observer import Observer

_RULE = (
    "a draft model shares this parameter, and the served model's own tensor is what is stored in it"
)


def note_draft_write(
    report: RefitReport,
    target: Target,
    native: Any,
    loaded: torch.Tensor,
    args: tuple,
    kwargs: dict,
    stamp: int,
) -> None:
    """One loader call of a draft's load: `native(parameter, loaded, *args, **kwargs)`.

    Args:
        stamp: of the served model's own call of the same request, which may be still to come.

    Raises:
        RefitError: it can't be compared with what is served.
    """
    name, parameter = target.name, target.parameter
    check_dtype(target, name, loaded)
    check_shape(target, name, loaded, args, kwargs)
    nothing = ModelMemory(torch.nn.Module(), ())
    found = Observer(SourceIndex(), nothing, lambda *_: None, {}, stores=True).writes_of(
        lambda one: native(one, loaded, *args, **kwargs),
        make_stand_in(parameter, loaded.dtype),
        parameter,
    )
    if target.is_fp8 or found.other:
        value = f"written by a draft model's load, {found.other or 'and served in FP8'}"
        remedy = "Send the update with selector='target', or add the module to ignored_layers."
        raise RefitError(name, value, _RULE, remedy)
    copies = [one for one in found.writes if one.source is not None]
    parts = ((one.source, one.destination(parameter)) for one in copies)
    report.sent_twice.note(name, parts, stamp, _RULE)  # type: ignore[arg-type]
