"""The Triton cast and back: the reference's bytes, in the interpreter here and on hardware there."""

from __future__ import annotations

import itertools

import pytest
import torch
from support.numerics.interpreted import interpreted
from support.numerics.numerics_cases import CASES, ROUNDINGS, not_finite

from sglang_fp8rl.numerics import through_fp8

pytest.importorskip("triton")


def near_the_largest() -> torch.Tensor:
    """In FP32, beyond BF16; what is small or zero beside it is still a number afterwards."""
    x = torch.randn(140, 150, generator=torch.Generator().manual_seed(4))
    x[3, 4], x[3, 5] = 3.3962e38, 0.0
    return x


def jobs_of(cases: dict[str, torch.Tensor], rows: int | None) -> list[tuple]:
    """The interpreter spends milliseconds on each program, that is, on each block or row."""
    jobs = []
    for source, by_rows in itertools.product(cases.values(), (False, True)):
        few = source[:rows] if by_rows else source[: rows and 40 * rows]
        block = (1, source.shape[1]) if by_rows else (128, 128)
        # Without the step to BF16 in one of them.
        for options in ROUNDINGS if rows is None else ROUNDINGS[1:3]:
            jobs.append((few, block, options))
    return jobs


def by_kernel(jobs: list[tuple]) -> list[torch.Tensor]:
    return [through_fp8(job, block, backend="triton", **options) for job, block, options in jobs]


def expect_the_reference(jobs: list[tuple], results: list[torch.Tensor]) -> None:
    for (source, block, options), found in zip(jobs, results, strict=True):
        expected = through_fp8(source.cpu(), block, backend="reference", **options)
        found, number = found.cpu(), ~expected.isnan()
        assert torch.equal(found.isnan(), ~number)
        same = found.view(torch.int16) == expected.view(torch.int16)
        assert bool(same[number].all()), (source.shape, source.dtype, block, options)


SOURCES = {
    **CASES,
    **{str(dtype): not_finite(dtype) for dtype in (torch.float32, torch.bfloat16)},
    "near the largest": near_the_largest(),
}


def test_the_interpreter_gives_the_reference_bytes(tmp_path):
    jobs = jobs_of(SOURCES, rows=4)
    expect_the_reference(jobs, interpreted(by_kernel, jobs, tmp_path))


@pytest.mark.gpu
def test_hardware_gives_the_reference_bytes():
    wide = {"a long row": torch.randn(5, 40000)}
    cases = {name: source.cuda() for name, source in {**SOURCES, **wide}.items()}
    jobs = jobs_of(cases, rows=None)
    expect_the_reference(jobs, by_kernel(jobs))
