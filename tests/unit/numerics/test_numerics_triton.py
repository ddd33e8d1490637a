"""The Triton casts: same bytes as the reference, in the interpreter here and on hardware there."""

import itertools
import os
import pathlib
import subprocess
import sys

import numerics_in_interpreter
import pytest
import torch
from by_definition import quantize_blockwise, quantize_per_channel
from numerics_cases import CASES, same_bits

from sglang_fp8rl.numerics import Blockwise, PerChannel, cast_into

pytest.importorskip("triton")

# The interpreter spends milliseconds on each program, that is, on each block or row.
SMALL = {n: x[:40] if x.shape[0] > 140 and x.shape[1] > 300 else x for n, x in CASES.items()}
ALL_OPTIONS = [
    {"pow2_scale": p, "round_to_bf16": r} for p, r in itertools.product([False, True], repeat=2)
]


def _not_finite(dtype: torch.dtype) -> torch.Tensor:
    x = torch.randn(140, 150, generator=torch.Generator().manual_seed(3)).to(dtype)
    x[3, 4], x[139, 149] = float("nan"), -float("inf")
    if dtype == torch.float32:
        x.view(torch.int32)[139, 3] = 0x7FFFFFFF  # carries into the sign when rounded to BF16
        x.view(torch.int32)[3, 149] = 0x7F7F8000  # overflows BF16
    return x


def _jobs(cases: dict, all_options: bool) -> dict[str, dict]:
    jobs = {}
    for name, source in cases.items():
        for per_channel in (False, True):
            rows = source
            if per_channel and not all_options:
                few = [7, 51, 59, 117] if name == "every amax of a binade" else slice(4)
                rows = source[few]  # of that one, rows where a reciprocal is not exact enough
            for options in ALL_OPTIONS if all_options else ALL_OPTIONS[::3]:
                job = {"source": rows, "per_channel": per_channel, "options": options}
                jobs[f"{name}, per_channel={per_channel}, {options}"] = job
    return jobs


def _expect_the_reference(jobs: dict[str, dict], results: list[tuple]) -> None:
    for (name, job), (qweight, scales, flags, intact) in zip(jobs.items(), results, strict=True):
        source = job["source"].cpu()
        granularity = PerChannel() if job["per_channel"] else Blockwise()
        expected = torch.full_like(qweight.cpu().view(torch.uint8), 0x7F).view(qweight.dtype)
        expected_scales = torch.full_like(scales.cpu(), -7.0)
        options = job["options"]
        expected_flags = cast_into(
            source,
            expected,
            expected_scales,
            granularity,
            backend="reference",
            **options,
        )
        assert intact, name
        assert torch.equal(flags.cpu(), expected_flags.view(flags.shape)), name
        assert same_bits(qweight.cpu(), expected), name
        assert same_bits(scales.cpu(), expected_scales), name


def test_interpreter_gives_the_reference_bytes(tmp_path):
    cases = {f"not finite {d}": _not_finite(d) for d in (torch.float32, torch.bfloat16)}
    cases["a long row"] = torch.randn(1, 40000)
    jobs = _jobs({**SMALL, **cases}, all_options=False)
    torch.save(list(jobs.values()), tmp_path / "jobs.pt")
    script = pathlib.Path(numerics_in_interpreter.__file__)
    done = subprocess.run(
        [sys.executable, str(script), str(tmp_path / "jobs.pt"), str(tmp_path / "results.pt")],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    _expect_the_reference(jobs, torch.load(tmp_path / "results.pt"))


@pytest.mark.gpu
def test_hardware_gives_the_reference_bytes():
    cases = {f"not finite {d}": _not_finite(d) for d in (torch.float32, torch.bfloat16, torch.half)}
    wide = {"a long row": torch.randn(5, 40000)}
    jobs = _jobs({**CASES, **cases, **wide}, all_options=True)
    for job in jobs.values():
        source = job["source"]  # keep the strides: views of a copied base
        base = source.as_strided(
            (source.untyped_storage().nbytes() // source.element_size(),), (1,), 0
        )
        job["source"] = base.cuda().as_strided(
            source.shape, source.stride(), source.storage_offset()
        )
    _expect_the_reference(jobs, numerics_in_interpreter.run(list(jobs.values())))


@pytest.mark.gpu
def test_hardware_by_default_uses_triton_and_does_not_wait():
    source = torch.randn(4096, 4096, device="cuda")
    qweight = torch.empty_like(source, dtype=torch.float8_e4m3fn)
    scales = torch.empty(32, 32, device="cuda")
    cast_into(source, qweight, scales, Blockwise())  # compiles
    torch.cuda.set_sync_debug_mode("error")
    try:
        flags = cast_into(source, qweight, scales, Blockwise())
        row_scales = torch.empty(4096, 1, device="cuda")
        row_codes = torch.empty_like(qweight)
        cast_into(source, row_codes, row_scales, PerChannel())
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert not flags.any()
    for actual, expected in (
        ((qweight, scales), quantize_blockwise(source)),
        ((row_codes, row_scales), quantize_per_channel(source)),
    ):
        assert all(same_bits(a, e) for a, e in zip(actual, expected, strict=True))
