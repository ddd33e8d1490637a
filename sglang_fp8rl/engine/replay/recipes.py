"""How a bucket of one layout is written: from one table of casts and copies, without a loader, a name lookup or any
Python per tensor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ...config import Options
from ...numerics.backends import TableRunner, make_runner
from ...numerics.write_table import BAD_SCALE, NAN_CODE, CastTable, Kind
from ..arrival.bucket import Bucket, FlatBucket
from ..interception import Write
from ..ledger.ledger import Arrived, Ledger
from ..model.parameters import Target
from ..modules.method import are_no_exponents
from ..native.call import Call
from ..native.pairs import bad_scale_error, check_exponents, nan_code_error
from ..native.recording import Recording
from ..native.tied import note_tied


@dataclass
class Recipe:
    """How a bucket of one layout is written.

    Attributes:
        layout: of the bucket it was recorded from.
        brings: what each bucket of that layout brings.
        positions: per row of the table, the tensor it is from.
        fills: of targets, which no sent tensor has.
        kv_scales: positions of scales of the KV cache, which are read each time.
        tied: as of the call that it was recorded from.
        regions, targets: numbers of the boxes that are written, indices of the parameters.
        owners: parameters and scales that are written, and where they were.
        exponents: positions of scales that have to be powers of two.
        metadata, names: of a flattened bucket, which makes neither of them again.
    """

    layout: tuple[list, ...]
    brings: Arrived
    positions: np.ndarray
    runner: TableRunner
    fills: list[tuple[Target, Write]]
    kv_scales: list[int]
    tied: dict[int, str]
    regions: np.ndarray
    targets: np.ndarray
    owners: list[tuple[torch.Tensor, int]]
    exponents: tuple[int, ...]
    metadata: Sequence[Any]
    names: list[str]

    @property
    def size(self) -> int:
        return self.brings.tensors

    def write(self, bucket: Bucket, ledger: Ledger, call: Call) -> None:
        """Write a bucket of this layout, in a call.

        Raises:
            RefitError: an FP8 pair that can't be served; nothing of the bucket was written.
        """
        self._check_exponents(bucket)
        for target, write in self.fills:
            write.destination(target.parameter).fill_(write.fill)
        flags = self.runner.run(bucket.addresses())
        if flags.any():
            self._note_bad_pieces(call, bucket, flags)
        ledger.coverage.write(self.targets, self.regions, ledger.stamp)
        for position, other in self.tied.items():
            note_tied(ledger, call, bucket.names[position], bucket.tensor(position), other)
        call.sources.set_aside = {bucket.names[at]: bucket.tensor(at) for at in self.kv_scales}

    def _check_exponents(self, bucket: Bucket) -> None:
        """Look at all scales that are served as exponents at once: the table would copy any."""
        scales = [bucket.tensor(position).reshape(-1) for position in self.exponents]
        if scales and bool(are_no_exponents(torch.cat(scales)).any()):
            for position in self.exponents:
                check_exponents(bucket.names[position], bucket.tensor(position))

    def _note_bad_pieces(self, call: Call, bucket: Bucket, flags: Any) -> None:
        """Put what the table did not write down to the names it came under."""
        table = self.runner.table
        for piece in table.bad_pieces(flags):
            name = bucket.names[self.positions[piece]]
            found = table.flags_of(flags, piece)
            if table.pieces["kind"][piece] != Kind.CODES:
                call.not_finite.append((name, torch.from_numpy(found.astype(bool))))
                continue
            codes = set(found.ravel().tolist())
            if NAN_CODE in codes:
                call.errors[name] = str(nan_code_error(name))
            if BAD_SCALE in codes:
                scale_name = bucket.names[self.positions[piece - 1]]
                text = str(bad_scale_error(scale_name))
                call.errors |= {name: text, scale_name: text}


def recipe_of(
    recording: Recording,
    call: Call,
    options: Options,
    targets: np.ndarray,
    owners: Sequence[Target],
) -> Recipe | None:
    """The recipe of a call in which all was copied; None without kernels for the device.

    Args:
        targets: numbers of the `owners` of what is written.
    """
    bucket = recording.bucket
    pairs = ((one.parameter, one.scale) for one in owners)
    memory = tuple(tensor for pair in pairs for tensor in pair if tensor is not None)
    runner = make_runner(
        CastTable(recording.fields, memory),
        owners[0].parameter.device if owners else torch.device("cpu"),
        pow2_scale=options.use_weight_pow2_scale,
        round_to_bf16=options.round_to_bf16,
    )
    if runner is None:
        return None
    aside = set(call.kv_scales)
    return Recipe(
        layout=bucket.layout,
        brings=call.brought,
        positions=recording.positions,
        runner=runner,
        fills=recording.fills,
        kv_scales=[at for at, name in enumerate(bucket.names) if name in aside] if aside else [],
        tied=call.tied,
        regions=recording.boxes[:, 1].copy(),
        targets=targets,
        owners=[(one, one.data_ptr()) for one in memory],
        exponents=tuple(recording.exponents),
        metadata=bucket.metadata if isinstance(bucket, FlatBucket) else (),
        names=bucket.names,
    )
