"""Sessions in which nothing was loaded: whether something wrote weights past `load_weights`, as RDMA does."""

from __future__ import annotations

import torch

from ...numerics.fingerprint import MASK, NumberTable, whole
from ...wire.refit_note import ALL
from ..refit import ModelRefit
from .record import Session

# Of each parameter. Who writes past `load_weights` writes whole tensors: of 32,768 FP8 codes a step of RL changes some.
_RUNS, _RUN_WORDS = 512, 8


def memory_number(refit: ModelRefit) -> int:
    """One number for all that updates write: the same as long as none of the words that it looks at changes. Waits for
    each GPU once."""
    held = [one.parameter.data for one in refit.written_targets() if not one.parameter.is_meta]
    boxes = [[whole(_some_of(tensor), seed)] for seed, tensor in enumerate(held)]
    return sum(NumberTable(boxes).numbers()) & MASK


def _some_of(tensor: torch.Tensor) -> torch.Tensor:
    """Words of a tensor in runs that are evenly spread; a small one's are all of it."""
    words = tensor.contiguous().view(-1).view(torch.uint8)
    if not (words.storage_offset() % 8 or len(words) % 8):
        words = words.view(torch.int64)
    step = len(words) // _RUNS
    if step <= _RUN_WORDS:
        return words
    return words.as_strided((_RUNS, _RUN_WORDS), (step, 1))


def wrong_with_an_empty_session(session: Session | None, refit: ModelRefit) -> str | None:
    """What is wrong with the session that ends, if nothing was loaded in it."""
    if session is None:
        return None
    if session.given_up is not None and session.note is not None and session.note.extent == ALL:
        return f"{session.given_up.describe()} did not bring what was announced. Send the update again, whole"
    if session.has_begun:
        return None
    if session.note is not None:
        if session.was_used and session.note.extent != ALL:
            return None  # a draft's weights are no refit
        return "the session was opened for a refit, and nothing came in it. Send it again"
    if session.was_loaded or memory_number(refit) == session.number:
        return None
    return (
        "weights changed in a session in which nothing was loaded: what wrote them (by RDMA?) was not seen, "
        "so neither scales nor completeness are known. Send all weights through update_weights_from_*"
    )
