"""The matrices of recorded writes, as pieces of a table: views of what was sent and what is served."""

from __future__ import annotations

import torch

from ...config import Options
from ...numerics.finite_copy import as_matrix
from ...numerics.grid import granularity_of
from ...numerics.write_table import Kind, Piece
from ..arrival.bucket import Bucket
from ..native.cast_write import matrices, scales_of
from ..native.recording import RecordedPair, RecordedPiece, Recording


def pairs_of(
    recording: Recording,
) -> tuple[list[tuple[RecordedPair, list[Piece]]], dict[int, str]]:
    """Each pair's pieces, scales and codes in turn; and what stays native, both halves or neither."""
    native = dict(recording.refused)
    for position, count in recording.waiting.items():
        if count:
            native.setdefault(position, "half of an FP8 pair, the other is in another bucket")
    made = [(pair, _pair_pieces(recording.bucket, pair)) for pair in recording.pairs]
    for pair, pieces in made:
        if pair.copies and not pieces:  # without copies it is for another rank's experts
            native.setdefault(pair.weight, "an FP8 pair that the kernels can't copy")
    while any((pair.weight in native) != (pair.scale in native) for pair, _ in made):
        for pair, _ in made:
            for one, other in ((pair.weight, pair.scale), (pair.scale, pair.weight)):
                if one in native:
                    native.setdefault(other, native[one])
    return made, native


def _pair_pieces(bucket: Bucket, pair: RecordedPair) -> list[Piece]:
    """Scales and codes in turn; none if the kernels don't take one of them."""
    pieces = []
    for copy in pair.copies:
        source, destination = copy.write.source, copy.write.destination(pair.target.parameter)
        assert source is not None
        views = ((pair.scale, copy.scale_source), (pair.weight, source))
        if not all(_lies_in(bucket.tensor(position), view) for position, view in views):
            return []
        scale_place, place = (_place(bucket, *one) for one in views)
        scales = Piece(scale_place, copy.scale_source, copy.scale_destination, kind=Kind.SCALES)
        codes = Piece(place, source, destination, None, (copy.block_n, 1), Kind.CODES)
        pieces += [scales, codes]
    is_local = all(piece.view.device == piece.destination.device for piece in pieces)
    return pieces if is_local and all(piece.fits() for piece in pieces) else []


def _lies_in(sent: torch.Tensor, view: torch.Tensor) -> bool:
    return sent.untyped_storage().data_ptr() == view.untyped_storage().data_ptr()


def _place(bucket: Bucket, position: int, view: torch.Tensor) -> tuple[int, int]:
    """Which sent tensor a view of a bucket's tensor lies in, and how many bytes behind its start."""
    first, start = bucket.place(position)
    return first, view.data_ptr() - bucket.tensor(position).data_ptr() + start


def pieces_of(bucket: Bucket, recorded: RecordedPiece, options: Options) -> list[Piece]:
    """The matrices of one write; none if source and destination are on different devices."""
    sent, target = bucket.tensor(recorded.position), recorded.target
    write = recorded.write.repeat(sent)
    source, destination = write.source, write.destination(target.parameter)
    assert source is not None
    assert write.region is not None
    if source.device != destination.device or source.shape != destination.shape:
        return []
    if not target.is_fp8:
        rows, out = as_matrix(source), as_matrix(destination)
        if rows is None or out is None:
            return []
        return [Piece(_place(bucket, recorded.position, source), rows, out)]
    assert target.scale is not None
    scales, region = target.scale.data, write.region
    if scales.dim() == 3:
        scales = scales[region.start[0] : region.start[0] + region.shape[0]]
    granularity = granularity_of(target.granularity, options.weight_block_size)
    made = []
    for codes, view, part in zip(
        matrices(destination), matrices(source), matrices(scales), strict=True
    ):
        owned = scales_of(target, target.name, region, part, granularity)
        place = _place(bucket, recorded.position, view)
        made.append(Piece(place, view, codes, owned, granularity.block(view.shape)))
    return made
