"""The Triton casts: same bytes as the reference, in the interpreter here and on hardware there."""

import importlib
import itertools
import sys

import pytest
import torch
from support.by_definition import quantize_blockwise, quantize_per_channel
from support.numerics.gpu import no_waiting, with_strides
from support.numerics.interpreted import interpreted
from support.numerics.numerics_cases import (
    CASES,
    ROUNDINGS,
    destination,
    not_finite,
    outside_is_untouched,
    same_bits,
    scale_shape,
)

from sglang_fp8rl.errors import HostError
from sglang_fp8rl.lab import doctor
from sglang_fp8rl.numerics import cast_into
from sglang_fp8rl.numerics.cast import copy_finite_into

triton = pytest.importorskip("triton")

# The interpreter spends milliseconds on each program, that is, on each block or row.
SMALL = {n: x[:40] if x.shape[0] > 140 and x.shape[1] > 300 else x for n, x in CASES.items()}


def test_a_triton_that_divides_otherwise_is_refused_with_the_torch_that_has_another(monkeypatch):
    from sglang_fp8rl.numerics import triton as kernels

    monkeypatch.setattr(triton, "__version__", "3.5.1")
    with pytest.raises(HostError, match=r"3\.5\.1.*torch 2\.10"):
        importlib.reload(kernels)
    monkeypatch.delitem(sys.modules, kernels.__name__)
    assert [text for state, text in doctor._casts() if state == doctor.PROBLEM and "3.5.1" in text]


def _not_finite(dtype: torch.dtype) -> torch.Tensor:
    x = not_finite(dtype)
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
            for options in ROUNDINGS if all_options else ROUNDINGS[::3]:
                job = {"source": rows, "per_channel": per_channel, "options": options}
                jobs[f"{name}, per_channel={per_channel}, {options}"] = job
    return jobs


def _copies() -> dict[str, dict]:
    """Rows of every length that a launch tells apart; some hold what is not finite, or only in another dtype."""
    floats = (torch.float32, torch.bfloat16, torch.float16)
    jobs = {}
    for name, source in {
        "halfway": CASES["one ulp beside bf16 boundaries"][:6],
        "not finite": _not_finite(torch.float32)[[3, 4, 139]],
        "subnormal": CASES["fp16 subnormals"][[0, 3, 7]].float() * 0.5,
        "beside the largest FP16": torch.tensor([[65519.9], [65520.0], [-65504.0], [3.39e38]]),
        "odd": CASES["rows at an odd offset"][:3],
        "one row": torch.randn(700, generator=torch.Generator().manual_seed(6)),
    }.items():
        for dtype, to in itertools.product(floats, floats):
            jobs[f"{name}: {dtype} to {to}"] = {"source": source.to(dtype), "to": to}
    return jobs


def by_kernel(jobs: list[dict]) -> list[tuple]:
    """Of a cast codes, scales, flags, and whether the rim is untouched; of a copy what was written, and flags."""
    results: list[tuple] = []
    for job in jobs:
        source = job["source"]
        if "to" in job:
            out = torch.full(source.shape, 3.0, dtype=job["to"], device=source.device)
            results.append((out, copy_finite_into(source, out, backend="triton")))
            continue
        block = (1, source.shape[1]) if job["per_channel"] else (128, 128)
        shape = scale_shape(source, job["per_channel"])
        outer, qweight, rim, scales = destination(*source.shape, shape, source.device)
        flags = cast_into(source, qweight, scales, block, backend="triton", **job["options"])
        intact = outside_is_untouched(outer, rim, *source.shape)
        results.append((qweight.clone(), scales.clone(), flags, intact))
    return results


def _expect_torch_s_copies(jobs: dict[str, dict], results: list[tuple]) -> None:
    for (name, job), (out, bad) in zip(jobs.items(), results, strict=True):
        expected = torch.full(job["source"].shape, 3.0, dtype=job["to"])
        flags = copy_finite_into(job["source"].cpu(), expected, backend="reference")
        assert torch.equal(bad.cpu(), flags), name
        assert same_bits(out.cpu(), expected), name


def _expect_the_reference(jobs: dict[str, dict], results: list[tuple]) -> None:
    for (name, job), (qweight, scales, flags, intact) in zip(jobs.items(), results, strict=True):
        source = job["source"].cpu()
        block = (1, source.shape[1]) if job["per_channel"] else (128, 128)
        expected = torch.full_like(qweight.cpu().view(torch.uint8), 0x7F).view(qweight.dtype)
        expected_scales = torch.full_like(scales.cpu(), -7.0)
        options = job["options"]
        expected_flags = cast_into(
            source,
            expected,
            expected_scales,
            block,
            backend="reference",
            **options,
        )
        assert intact, name
        assert torch.equal(flags.cpu(), expected_flags.view(flags.shape)), name
        assert same_bits(qweight.cpu(), expected), name
        assert same_bits(scales.cpu(), expected_scales), name


def test_interpreter_gives_the_reference_bytes(tmp_path):
    dtypes = (torch.float32, torch.bfloat16, torch.half)
    cases = {f"not finite {d}": _not_finite(d) for d in dtypes}
    cases["a long row"] = torch.randn(1, 40000)
    jobs, copies = _jobs({**SMALL, **cases}, all_options=False), _copies()
    both = [*jobs.values(), *copies.values()]
    results = interpreted(by_kernel, both, tmp_path)
    _expect_the_reference(jobs, results[: len(jobs)])
    _expect_torch_s_copies(copies, results[len(jobs) :])


@pytest.mark.gpu
def test_hardware_gives_the_reference_bytes():
    cases = {f"not finite {d}": _not_finite(d) for d in (torch.float32, torch.bfloat16, torch.half)}
    wide = {"a long row": torch.randn(5, 40000)}
    jobs = _jobs({**CASES, **cases, **wide}, all_options=True)
    for job in jobs.values():
        job["source"] = with_strides(job["source"], "cuda")
    _expect_the_reference(jobs, by_kernel(list(jobs.values())))


@pytest.mark.gpu
def test_hardware_copies_as_torch_does():
    jobs = {name: {**job, "source": job["source"].cuda()} for name, job in _copies().items()}
    _expect_torch_s_copies(jobs, by_kernel(list(jobs.values())))


@pytest.mark.gpu
def test_hardware_by_default_uses_triton_and_does_not_wait():
    source = torch.randn(4096, 4096, device="cuda")
    qweight = torch.empty_like(source, dtype=torch.float8_e4m3fn)
    scales = torch.empty(32, 32, device="cuda")
    cast_into(source, qweight, scales, (128, 128))  # compiles
    with no_waiting():
        flags = cast_into(source, qweight, scales, (128, 128))
        row_scales = torch.empty(4096, 1, device="cuda")
        row_codes = torch.empty_like(qweight)
        cast_into(source, row_codes, row_scales, (1, 4096))
    assert not flags.any()
    for actual, expected in (
        ((qweight, scales), quantize_blockwise(source)),
        ((row_codes, row_scales), quantize_per_channel(source)),
    ):
        assert all(same_bits(a, e) for a, e in zip(actual, expected, strict=True))
