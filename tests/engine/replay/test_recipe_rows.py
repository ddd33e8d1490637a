"""Rows made of recorded numbers are the rows of the views that they stand for."""

import pytest
from commands import model_of, update
from pool import on

pytestmark = pytest.mark.engine


def compared(scheduler, named_tensors, load_format):
    """Writes of one recorded call, and those whose row was made of numbers; both rows are equal."""
    from sglang_fp8rl.engine.replay import recipe_pieces, recipe_store
    from sglang_fp8rl.engine.replay.recipe_rows import plain_rows

    recordings, recipe_of = [], recipe_store.recipe_of

    def keep(recording, *rest):
        recordings.append(recording)
        return recipe_of(recording, *rest)

    recipe_store.recipe_of = keep
    try:
        assert update(scheduler, named_tensors, load_format)[0]
    finally:
        recipe_store.recipe_of = recipe_of
    (recording,) = recordings
    options = model_of(scheduler).fp8rl_refit.options
    pieces, found = recording.pieces, []
    targets = {one.target.index: one.target for one in pieces}
    plain = plain_rows(recording, targets, options)
    for recorded, row, is_plain in zip(pieces, plain.rows, plain.is_plain.tolist(), strict=True):
        if is_plain:
            (piece,) = recipe_pieces.pieces_of(recording.bucket, recorded, options)
            assert piece.fits()
            assert tuple(row) == tuple(piece.row()), recorded.target.name
        found.append((recorded.target.is_fp8, is_plain))
    return found


@pytest.mark.parametrize("load_format", [None, "flattened_bucket"])
@on("qwen3-tp2", "llama-misaligned-tp2", "qwen3-moe-misaligned-tp2", slow=("phi3-tp1",))
def test_rows_of_numbers_are_the_rows_of_the_views(host, load_format):
    for found in host.call_all(compared, list(host.model.second.items()), load_format):
        assert [is_fast for is_fp8, is_fast in found if is_fp8]
        assert all(is_fast == is_fp8 for is_fp8, is_fast in found)
