"""Parts of SGLang whose loaders do more than a linear layer's: convolutions, states, sinks; on each of two ranks.

The parts are SGLang's own, built as a rank of two (`tools/census/toys/sharded.py`); the judge is SGLang's own load of
the same tensors.
"""

from __future__ import annotations

import inspect

import numpy as np
import pytest
import torch

pytest.importorskip("sglang")

from sglang_fp8rl.engine.law.law import law_of
from sglang_fp8rl.errors import RefitError
from tools.census.toys.sharded import (
    CONVOLUTIONS,
    KERNEL,
    NAMES,
    PARTS,
    RANKS,
    Model,
    bytes_of,
    check_same,
    loaded,
    weights,
)
from tools.census.toys.toy import attached, update

context = pytest.importorskip("sglang.srt.runtime_context")
if "enable_cp_tp_group_sharing" not in inspect.getsource(context):
    pytest.skip("parts of a rank are built here as newer ones build them", allow_module_level=True)


@pytest.mark.parametrize("rank", range(RANKS))
@pytest.mark.parametrize("part", PARTS)
def test_a_refit_is_what_sglang_makes_of_the_same_tensors(part, rank):
    refit = loaded(part, rank)
    for seed in (1, 2, 0):
        update(refit, weights(part, seed))
        alone = Model(part, rank)
        with torch.no_grad():
            alone.load_weights(weights(part, seed).items())
        check_same(bytes_of(refit.model), bytes_of(alone))
        lacking = np.flatnonzero(law_of(refit).lacking()).tolist()
        sent = {f"part.{place}" for _, place, *_ in refit.model.named.values()}
        assert not sent & {refit.ledger.targets[at].name for at in lacking}


@pytest.mark.parametrize("rank", range(RANKS))
@pytest.mark.parametrize(("part", "name"), NAMES)
@pytest.mark.parametrize("times", [2, 1.25, 0.5])
def test_what_is_too_long_or_too_short_is_refused_on_every_rank(part, name, times, rank):
    refit = loaded(part, rank)
    shape = list(PARTS[part][1][name][0])
    axis = next(at for at, size in enumerate(shape) if size != 1)
    shape[axis] = int(shape[axis] * times)
    wrong = {name: torch.randn(shape)}
    before = bytes_of(refit.model)
    for _ in range(2):  # what is refused once is refused again
        with pytest.raises(RefitError, match=f"{name}: shape .*{shape[axis]}"):
            update(refit, wrong)
        check_same(bytes_of(refit.model), before)
    for seed in (1, 2):  # and life goes on
        update(refit, weights(part, seed))
    with pytest.raises(RefitError, match=f"{name}: shape .*{shape[axis]}"):
        update(refit, weights(part, 1) | wrong)


@pytest.mark.parametrize(("part", "name"), CONVOLUTIONS)
@pytest.mark.parametrize("tail", [(KERNEL,), (1, KERNEL + 1), (KERNEL, 1)])
def test_a_convolution_takes_rows_one_and_kernel_at_the_start_and_later(part, name, tail):
    refit, starting = loaded(part, 0), attached(Model(part, 0))
    rows = PARTS[part][1][name][0][0]
    wrong = weights(part, 1) | {name: torch.randn(rows, *tail)}
    with pytest.raises(RefitError, match=f"{name}: shape"):
        update(refit, wrong)
    with pytest.raises(RefitError, match=f"{name}: shape"):
        starting.model.load_weights(iter(wrong.items()))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1000.0])
def test_what_is_made_of_a_value_that_is_not_finite_keeps_its_old_bytes(value):
    """Of Mamba2 `A = -exp(A_log)` is served: of 1000 it is infinite."""
    refit = loaded("mamba2", 0)
    before = bytes_of(refit.model)
    wrong = weights("mamba2", 0)
    wrong["A_log"][1] = value
    for _ in range(2):
        with pytest.raises(RefitError, match="A_log: NaN or Inf"):
            update(refit, wrong)
        check_same(bytes_of(refit.model), before)
    update(refit, weights("mamba2", 1))
