"""Sessions in which nothing was loaded: whether something wrote weights past `load_weights`, as RDMA does."""

from __future__ import annotations

import torch

from ...numerics.fingerprint import MASK
from ...wire.refit_note import ALL
from ..refit import ModelRefit
from .record import Session

# Of each parameter. Who writes past `load_weights` writes whole tensors: of 32,768 FP8 codes a step of RL changes some.
_WORDS = 4096


def memory_number(refit: ModelRefit) -> int:
    """One number for all that updates write: the same as long as none of the words that it looks at changes."""
    numbers = (
        (index + 1) * _checksum(target.parameter.data)
        for index, target in enumerate(refit.written_targets())
        if target.parameter.device.type != "meta"
    )
    return sum(numbers) & MASK


def _checksum(tensor: torch.Tensor) -> int:
    """Sum some of its int64 words, evenly spread, and the tail bytes."""
    data = tensor.contiguous().view(-1).view(torch.uint8)
    whole = 0 if data.storage_offset() % 8 else len(data) // 8 * 8
    step = max(1, whole // 8 // _WORDS)
    words = data[:whole].view(torch.int64)[::step].sum() if whole else 0
    return int(words) + int(data[whole:].sum())


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
