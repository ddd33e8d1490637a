"""The in-place casts: every backend writes the reference's bytes, and nothing else."""

import itertools
import sys

import pytest
import torch
from support.by_definition import quantize_blockwise, quantize_per_channel
from support.numerics.numerics_cases import (
    CASES,
    POISON_CODE,
    ROUNDINGS,
    bits,
    destination,
    outside_is_untouched,
    same_bits,
    scale_shape,
)
from support.python import printed_by

from sglang_fp8rl.errors import QuantizationError
from sglang_fp8rl.numerics import (
    FP8_DTYPE,
    FP8_MAX,
    cast_into,
    quantize,
    through_fp8,
)
from sglang_fp8rl.numerics.cast import copy_finite_into
from sglang_fp8rl.numerics.cpu import jit as cpu_jit
from sglang_fp8rl.numerics.cpu import table as cpu_table

BACKENDS = ["reference", "numba"]


@pytest.fixture(params=BACKENDS)
def backend(request):
    if request.param == "numba":
        pytest.importorskip("numba")
    return request.param


def _cast(source, per_channel, **options):
    rows, cols = source.shape
    outer, qweight, rim, scales = destination(rows, cols, scale_shape(source, per_channel))
    addresses = qweight.data_ptr(), scales.data_ptr()
    nonfinite = cast_into(
        source, qweight, scales, (1, cols) if per_channel else (128, 128), **options
    )
    assert addresses == (qweight.data_ptr(), scales.data_ptr())
    assert outside_is_untouched(outer, rim, rows, cols)
    return qweight, scales, nonfinite


@pytest.mark.parametrize("per_channel", [False, True], ids=["blockwise", "per_channel"])
@pytest.mark.parametrize("name", CASES)
def test_writes_the_bytes_of_the_reference(name, per_channel, backend):
    source = CASES[name]
    before = bits(source.clone())
    quantize = quantize_per_channel if per_channel else quantize_blockwise
    for options in ROUNDINGS:
        expected, expected_scale = quantize(source, **options)
        qweight, scales, nonfinite = _cast(source, per_channel, backend=backend, **options)
        assert same_bits(qweight, expected)
        assert same_bits(scales, expected_scale)
        assert not nonfinite.any()
    assert torch.equal(bits(source.clone()), before)


@pytest.mark.parametrize("per_channel", [False, True], ids=["blockwise", "per_channel"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_block_that_is_not_finite_keeps_its_old_bytes(dtype, per_channel, backend):
    finite = torch.randn(300, 400, generator=torch.Generator().manual_seed(5)).to(dtype)
    infinity = float("inf")
    for transposed, bad in itertools.product([False, True], [float("nan"), infinity, -infinity]):
        source = finite.clone()
        places = [(0, 0), (200, 130), (299, 399)]
        for place in places:
            source[place] = bad
        if transposed:
            source = source.t().contiguous().t()
        expected, scale = (quantize_per_channel if per_channel else quantize_blockwise)(finite)
        wanted = torch.zeros(scale_shape(source, per_channel), dtype=torch.bool)
        for row, col in places:
            wanted[(row, 0) if per_channel else (row // 128, col // 128)] = True
        keep = wanted if per_channel else wanted.repeat_interleave(128, 0)[:300]
        keep = keep.expand(-1, 400) if per_channel else keep.repeat_interleave(128, 1)[:, :400]
        qweight, scales, nonfinite = _cast(source, per_channel, backend=backend)
        assert torch.equal(nonfinite, wanted)
        assert torch.equal(bits(qweight), bits(expected).masked_fill(keep, POISON_CODE))
        assert torch.equal(scales, scale.masked_fill(wanted, -7.0))


@pytest.mark.parametrize("pattern", [0x7F800001, -0x7FFFFF, -1, 0x7FFFFFFF, 0x7F7F8000])
def test_every_kind_of_not_finite_is_seen(pattern, backend):
    """Signalling NaN, both signs, payloads that the BF16 rounding carries over, BF16 overflow."""
    source = torch.ones(4, 4)
    source.view(torch.int32)[3, 1] = pattern
    qweight, _, nonfinite = _cast(source, False, backend=backend)
    assert nonfinite.item()
    assert (bits(qweight) == POISON_CODE).all()
    overflow_only = pattern == 0x7F7F8000
    _, _, nonfinite = _cast(source, False, backend=backend, round_to_bf16=False)
    assert nonfinite.item() is not overflow_only


@pytest.mark.parametrize(
    "amax", [448.0, 1.0, 3.140625, 3.3895313892515355e38, 2.0**-126, 2.0**-130]
)
def test_every_bf16_value_has_the_code_that_torch_gives(amax, backend):
    """All 65,280 finite BF16 values, those below each amax, against torch's own cast."""
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    source = every[every.abs().float() <= amax].float()[None]
    assert source.max() == amax
    qweight, scales, _ = _cast(source, True, backend=backend)
    scale = max(torch.tensor(amax) / FP8_MAX, torch.tensor(torch.finfo(torch.float32).tiny))
    assert scales.item() == scale
    assert same_bits(qweight, (source / scale).clamp(-FP8_MAX, FP8_MAX).to(FP8_DTYPE))


@pytest.mark.parametrize("block_size", [(1, 1), (3, 5), (1, 128), (64, 32), [128, 300], (500, 700)])
def test_any_block_size(block_size, backend):
    for name in ("127x257", "transposed", "fp16"):
        source = CASES[name]
        expected, scale = quantize_blockwise(source, block_size)
        qweight, scales = torch.empty_like(expected), torch.empty_like(scale)
        cast_into(source, qweight, scales, block_size, backend=backend)
        assert same_bits(qweight, expected)
        assert same_bits(scales, scale)


def test_scales_may_be_strided(backend):
    source = CASES["127x257"]
    expected, scale = quantize_per_channel(source)
    for scales in (torch.empty(127, 4)[:, 1:2], torch.empty(4, 127).t()[:, 2:3]):
        qweight = torch.empty_like(expected)
        nonfinite = cast_into(source, qweight, scales, (1, source.shape[1]), backend=backend)
        assert nonfinite.shape == (127, 1)
        assert same_bits(qweight, expected)
        assert torch.equal(scales.reshape(-1), scale[:, 0])


def test_threads_do_not_change_the_bytes(monkeypatch):
    pytest.importorskip("numba")

    monkeypatch.setattr(cpu_jit, "WORTH_A_THREAD", 1000)
    source = CASES["576x1368"].clone()
    source[400, 1000] = float("nan")
    results = []
    for threads in (1, 2, 3, 5, 64):
        _, qweight, _, scales = destination(576, 1368, (5, 11))
        flags = torch.empty(5, 11, dtype=torch.bool)
        monkeypatch.setattr(torch, "get_num_threads", lambda: threads)  # noqa: B023
        cpu_table.cast_into(source, qweight, scales, flags, (128, 128), False, True)
        results.append((bits(qweight.clone()), scales.clone(), flags))
    for result in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(result, results[0], strict=True))


def test_parameters_and_inference_tensors_can_be_written(backend):
    source = torch.nn.Parameter(CASES["1x129"].clone())
    with torch.inference_mode():
        qweight = torch.empty(1, 129, dtype=FP8_DTYPE)
        scales = torch.empty(1, 2)
        cast_into(source, qweight, scales, (128, 128), backend=backend)
    assert same_bits(qweight, quantize_blockwise(source)[0])


def test_fp16_has_its_small_numbers_where_subnormals_are_flushed(backend):
    """As torch does if asked, and whoever loads a library that was built with -ffast-math."""
    every = torch.arange(2**15, dtype=torch.int32).to(torch.int16).view(torch.float16)
    source = every[every.isfinite()][None]
    wide, out = source.float(), torch.zeros(source.shape)
    expected, scales = quantize(wide, (1, 128), backend="reference")
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor can't")
    try:
        found = quantize(source, (1, 128), backend=backend)
        copy_finite_into(source, out, backend=backend)
    finally:
        torch.set_flush_denormal(False)
    assert same_bits(found[0], expected)
    assert same_bits(found[1], scales)
    assert same_bits(out, wide)


@pytest.mark.parametrize("columns", [129, 1])
def test_a_lazily_negated_source_has_its_sign(columns, backend):
    weight = torch.randn(130, columns, generator=torch.Generator().manual_seed(7))
    source, block = torch._neg_view(weight), (128, 128)  # as `.conj().imag` is
    expected = quantize_blockwise(-weight)[0]
    assert same_bits(quantize(source, backend=backend)[0], expected)
    served = through_fp8(-weight, block, backend="reference")
    assert same_bits(through_fp8(source, block, backend=backend), served)
    out = torch.zeros_like(weight)
    assert not copy_finite_into(source, out, backend=backend).any()
    assert same_bits(out, -weight)


@pytest.mark.parametrize(
    ("source", "qweight", "scales", "said"),
    [
        ((4, 4), torch.empty(4, 4, dtype=torch.uint8), torch.empty(1, 1), "dtype torch.uint8"),
        ((4, 4), torch.empty(4, 5, dtype=FP8_DTYPE), torch.empty(1, 1), r"\[4, 4\] for .*\[4, 5\]"),
        ((4, 4), torch.empty(4, 4, dtype=FP8_DTYPE).t(), torch.empty(1, 1), "row-major"),
        ((4, 4), torch.empty(1, 4, dtype=FP8_DTYPE).expand(4, 4), torch.empty(1, 1), "overlap"),
        ((4, 4), torch.empty(4, 4, dtype=FP8_DTYPE), torch.empty(1, 1).half(), "torch.float16"),
        ((4, 4), torch.empty(4, 4, dtype=FP8_DTYPE), torch.empty(1, 2), r"of shape \[1, 1\]"),
        ((4, 4), torch.empty(4, 4, dtype=FP8_DTYPE), torch.empty(1), r"weight scale \[1\]"),
        ((4, 4), torch.empty(4, 4, dtype=FP8_DTYPE, device="meta"), torch.empty(1, 1), "on meta"),
        ((4, 4), torch.empty(4, 4, dtype=FP8_DTYPE), torch.empty(1, 1, device="meta"), "on meta"),
        ((256, 4), torch.empty(256, 4, dtype=FP8_DTYPE), torch.empty(1, 1).expand(2, 1), "own mem"),
    ],
)
def test_refuses_destinations_that_do_not_fit(source, qweight, scales, said):
    with pytest.raises(QuantizationError, match=said) as error:
        cast_into(torch.ones(source), qweight, scales, (128, 128), name="model.q_proj.weight")
    assert error.value.subject == "model.q_proj.weight"


def test_an_unknown_backend_is_an_error():
    args = torch.ones(1, 1), torch.empty(1, 1, dtype=FP8_DTYPE), torch.empty(1, 1)
    with pytest.raises(ValueError, match="'cuda' on 'cpu': one of"):
        cast_into(*args, (128, 128), backend="cuda")


@pytest.mark.parametrize(("backend", "device"), [("numba", "meta"), ("triton", "cpu")])
def test_a_backend_of_another_device_is_refused_before_it_reads_an_address(backend, device):
    said = printed_by(f"""
        import torch
        from sglang_fp8rl.numerics import quantize
        try:
            quantize(torch.ones(4, 4, device={device!r}), backend={backend!r})
        except ValueError as error:
            print(error)
    """)
    assert said.startswith(f"backend {backend!r} on {device!r}: one of ")


def test_without_numba_the_bytes_are_the_same():
    said = printed_by("""
        import sys, torch
        sys.modules["numba"] = None  # an import of it raises ImportError
        from sglang_fp8rl import numerics
        from sglang_fp8rl.numerics.backends import make_runner
        from sglang_fp8rl.lab.testing.cast_tables import table_of
        cpu, rounding = torch.device("cpu"), {"pow2_scale": False, "round_to_bf16": True}
        assert make_runner(table_of([]), cpu, **rounding) is None
        x = torch.randn(300, 500)
        expected, scale = numerics.quantize(x, (128, 128), backend="reference")
        q, s = torch.empty_like(expected), torch.empty_like(scale)
        numerics.cast_into(x, q, s, (128, 128))
        print(torch.equal(q.view(torch.uint8), expected.view(torch.uint8)), torch.equal(s, scale))
    """)
    assert said.split() == ["True", "True"]


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_nothing_tensor_sized_is_allocated():
    """Peak resident memory over one cast of 64 MiB of FP32, in a process of its own.

    Numba needs a fixed scratch, and only for sources that are transposed or FP16; the PyTorch
    fallback needs some rows of blocks.
    """
    grown = printed_by("""
        import importlib.util, pathlib, torch
        from sglang_fp8rl import numerics
        torch.set_num_threads(1)
        def peak():
            text = pathlib.Path("/proc/self/status").read_text()
            return int(text.split("VmHWM:")[1].split()[0]) / 1024
        x = torch.randn(4096, 4096)
        half = x.half()
        q = torch.ones(4096, 4096, dtype=torch.uint8).view(numerics.FP8_DTYPE)
        s, blocks = torch.ones(32, 32), (128, 128)
        for backend in ("numba", "reference"):
            if backend == "numba" and not importlib.util.find_spec("numba"):
                continue
            for source in (x, x.t(), half) if backend == "numba" else (x,):
                # Code pages and allocator arenas of a first call are not what is measured.
                numerics.cast_into(source[:512], q[:512], s[:4], blocks, backend=backend)
                pathlib.Path("/proc/self/clear_refs").write_text("5")  # forget the peak so far
                before = peak()
                numerics.cast_into(source, q, s, blocks, backend=backend)
                print(backend, peak() - before)
    """)
    for line in grown.splitlines():
        backend, mib = line.split()
        assert float(mib) < {"numba": 8, "reference": 24}[backend], grown
