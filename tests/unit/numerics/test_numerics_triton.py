"""The Triton casts: same bytes as the reference, in the interpreter here and on hardware there."""

import itertools
import os
import pathlib
import subprocess
import sys

import numerics_in_interpreter
import pytest
import torch
from numerics_cases import CASES, same_bits

from sglang_fp8rl.numerics.reference import cast_into, quantize_blockwise, quantize_per_channel
from sglang_fp8rl.numerics.triton import cast as triton_cast

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
        block_size = (1, source.shape[1]) if job["per_channel"] else (128, 128)
        expected = torch.full_like(qweight.cpu().view(torch.uint8), 0x7F).view(qweight.dtype)
        expected_scales = torch.full_like(scales.cpu(), -7.0)
        options = job["options"]
        expected_flags = cast_into(
            source,
            expected,
            expected_scales,
            block_size,
            options["pow2_scale"],
            options["round_to_bf16"],
        )
        assert intact, name
        assert torch.equal(flags.cpu(), expected_flags.view(flags.shape)), name
        assert same_bits(qweight.cpu(), expected), name
        assert same_bits(scales.cpu(), expected_scales), name


def test_interpreter_gives_the_reference_bytes(tmp_path):
    cases = {f"not finite {d}": _not_finite(d) for d in (torch.float32, torch.bfloat16)}
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


def test_compiles_to_ieee_division_without_flushing():
    """No GPU needed: the PTX for Hopper divides exactly, flushes nothing, loads 16 bytes at once."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    kernel = triton_cast.cast_block_kernel
    types = {"source": "*i32", "codes": "*u8", "scales": "*fp32", "nonfinite": "*i8"}
    sizes = dict.fromkeys(("rows", "cols", "source_stride_n", "codes_stride_n"), "i32")
    constants = {"source_stride_k": 1, "scales_stride_k": 1, "KIND": 0, "POW2": False}
    constants |= dict.fromkeys(("BLOCK_N", "BLOCK_K", "PADDED_N", "PADDED_K"), 128) | {
        "ROUND": True
    }
    signature = {
        **types,
        **sizes,
        "scales_stride_n": "i32",
        **dict.fromkeys(constants, "constexpr"),
    }
    position = {name: i for i, name in enumerate(kernel.arg_names)}
    source = ASTSource(
        fn=kernel,
        signature={name: signature[name] for name in kernel.arg_names},
        constexprs={(position[name],): value for name, value in constants.items()},
        attrs={(position[name],): [["tt.divisibility", 16]] for name in (*types, *sizes)},
    )
    ptx = compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 8}).asm["ptx"]
    assert "div.rn.f32" in ptx
    assert "div.full" not in ptx
    assert "ftz" not in ptx
    assert "ld.global.v4" in ptx


@pytest.mark.gpu
def test_hardware_gives_the_reference_bytes():
    cases = {f"not finite {d}": _not_finite(d) for d in (torch.float32, torch.bfloat16, torch.half)}
    wide = {"row longer than one chunk": torch.randn(5, 40000)}
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
    from sglang_fp8rl.numerics import cast_blockwise_into

    qweight = torch.empty_like(source, dtype=torch.float8_e4m3fn)
    scales = torch.empty(32, 32, device="cuda")
    cast_blockwise_into(source, qweight, scales)  # compiles
    torch.cuda.set_sync_debug_mode("error")
    try:
        flags = cast_blockwise_into(source, qweight, scales)
        row_scales = torch.empty(4096, 1, device="cuda")
        row_codes = torch.empty_like(qweight)
        from sglang_fp8rl.numerics import cast_per_channel_into

        cast_per_channel_into(source, row_codes, row_scales)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert not flags.any()
    for actual, expected in (
        ((qweight, scales), quantize_blockwise(source)),
        ((row_codes, row_scales), quantize_per_channel(source)),
    ):
        assert all(same_bits(a, e) for a, e in zip(actual, expected, strict=True))
