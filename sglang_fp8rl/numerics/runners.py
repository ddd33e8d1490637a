"""Which kernels run a `CastTable`, by device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch

from .cast import is_there, warmup
from .write_table import CastTable, Widths


class TableRunner(Protocol):
    """A table that is ready to run."""

    table: CastTable

    def run(self, addresses: Sequence[int]) -> np.ndarray:
        """Write every piece from the memory at `addresses`.

        Returns when the memory has been read.

        Returns:
            uint8 flags, see `CastTable.flags_of`; overwritten by the next call.
        """


def make_runner(
    table: CastTable, device: torch.device, *, pow2_scale: bool, round_to_bf16: bool
) -> TableRunner | None:
    """The kernels for destinations on `device`; None where there are none."""
    rounding = {"pow2_scale": pow2_scale, "round_to_bf16": round_to_bf16}
    if device.type == "cuda":
        from .triton.table import TritonTable

        return TritonTable(table, device, **rounding)
    if device.type != "cpu" or not is_there("numba"):
        return None
    from .cpu.table import CpuTable

    return CpuTable(table, **rounding)


def warm_up(device: torch.device, widths: Widths, *, pow2_scale: bool, round_to_bf16: bool) -> None:
    """Compile a device's kernels now instead of in the first updates, or load them from the disk."""
    if device.type == "cuda":
        from .triton.table import rehearsal

        rounding = {"pow2_scale": pow2_scale, "round_to_bf16": round_to_bf16}
        table, sent = rehearsal(device, widths, **rounding)
        table.run([tensor.data_ptr() for tensor in sent])
    elif device.type == "cpu":
        warmup()
