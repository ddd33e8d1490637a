"""The GPU's fingerprints: the numbers of a CPU, in Triton's interpreter here and on hardware there."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from support.numerics.fake_gpu import fake_gpu
from support.numerics.gpu import no_waiting, with_strides
from support.numerics.interpreted import interpreted
from support.numerics.numerics_cases import random_bytes

from sglang_fp8rl.errors import QuantizationError
from sglang_fp8rl.numerics import quantize
from sglang_fp8rl.numerics.fingerprint import (
    MASK,
    Box,
    Matrix,
    NumberTable,
    _matrices,
    scaled_boxes,
    seed_of,
    whole,
)
from sglang_fp8rl.numerics.triton import fingerprint as on_gpu

DTYPES = (torch.uint8, torch.float8_e4m3fn, torch.bfloat16, torch.float32, torch.int32, torch.int64)


def tensors() -> dict[str, list[Box]]:
    """What models hold, and what is cut out of it: each with a seed of its own."""
    found: dict[str, torch.Tensor] = {}
    for dtype in DTYPES:
        found[f"{dtype}: whole tiles"] = random_bytes((128, 512), dtype)
        found[f"{dtype}: ragged"] = random_bytes((70, 201), dtype)
        found[f"{dtype}: a column"] = random_bytes((70, 1), dtype)
        found[f"{dtype}: a vector"] = random_bytes((77,), dtype)
        found[f"{dtype}: one number"] = random_bytes((1,), dtype).reshape(())
        found[f"{dtype}: nothing"] = random_bytes((0, 8), dtype)
        found[f"{dtype}: experts"] = random_bytes((3, 5, 48), dtype)
        found[f"{dtype}: turned"] = random_bytes((40, 24), dtype).t()
        found[f"{dtype}: every second row"] = random_bytes((66, 40), dtype)[::2]
        found[f"{dtype}: columns of experts"] = random_bytes((3, 5, 48), dtype)[:, 1:, 5:38]
    boxes = {name: [whole(one, seed_of(name))] for name, one in found.items()}
    part = random_bytes((90, 300), torch.uint8)
    for row, column, rows, columns in (
        (64, 128, 90, 172),
        (1, 7, 3, 5),
        (0, 1, 90, 1),
        (3, 16, 66, 284),
    ):
        here = part[row : row + rows, column : column + columns]
        boxes[f"a part at {row}, {column}"] = [Box(here, (90, 300), (row, column), 1 << 63)]
    weight = torch.randn(200, 300, generator=torch.Generator().manual_seed(0))
    for block in ((128, 128), (1, 300), (1, 150)):
        codes, scales = quantize(weight, block, backend="reference")
        boxes[f"quantized {block}"] = scaled_boxes("w", codes, [scales], (200, 300), (0, 0), block)
        stack = scaled_boxes("e", codes, [scales], (4, 200, 300), (2, 0, 0), block)
        boxes[f"an expert {block}"] = stack
        pair, both = torch.stack([codes.view(torch.uint8)] * 2).view(codes.dtype), [scales, scales]
        boxes[f"experts {block}"] = scaled_boxes("e", pair, both, (4, 200, 300), (1, 0, 0), block)
    return boxes


def by_kernel(tensors: list[list[Box]]) -> list[list[int]]:
    """Numbers of all tensors at once, whatever device they are on, twice by the same tables; then of each by itself."""
    parts = [
        (number, matrix)
        for number, boxes in enumerate(tensors)
        for box in boxes
        if box.tensor.numel()
        for matrix in _matrices(box)
    ]
    laid_out = on_gpu.LaidOut(parts, len(tensors))
    alone = torch.zeros(len(tensors), dtype=torch.int64)
    for number in {number for number, _ in parts}:
        of_one = [(0, matrix) for n, matrix in parts if n == number]
        assert len(of_one) <= on_gpu.FEW
        alone[number] = on_gpu.LaidOut(of_one, 1).start()[0]
    found = [laid_out.start(), laid_out.start(), alone]
    return [[value & MASK for value in one.tolist()] for one in found]


def test_the_interpreter_gives_the_numbers_of_a_cpu(tmp_path):
    cases = tensors()
    expected = NumberTable(list(cases.values())).numbers()
    assert len(set(expected)) > len(cases) - len(DTYPES)  # all but those of nothing differ
    for found in interpreted(by_kernel, list(cases.values()), tmp_path):
        assert dict(zip(cases, found, strict=True)) == dict(zip(cases, expected, strict=True))


def test_a_table_that_was_made_is_launched_again_without_a_look_at_its_tensors(monkeypatch):
    """But for a tensor that has to be copied into rows, each time."""
    looked_at = []
    fields = on_gpu._fields
    monkeypatch.setattr(on_gpu, "_fields", lambda *of: looked_at.append(of) or fields(*of))
    experts = random_bytes((200, 6, 32), torch.uint8).unbind(0)
    parts = [
        (n, Matrix(one, 0, 0, n))
        for n, one in enumerate([*experts, random_bytes((32, 6), torch.uint8).t()])
    ]
    table = on_gpu.LaidOut(parts, len(parts))
    assert len(looked_at) == len(experts)
    for times in (1, 2):
        with fake_gpu() as gpu:
            table.start()
        assert len(looked_at) == len(experts) + times
        assert sorted(one.grid[0] for one in gpu.launches) == [1, len(experts)]


@pytest.mark.gpu
def test_hardware_gives_the_numbers_of_a_cpu_in_one_wait():
    cases = tensors() | {"large": [whole(random_bytes((4096, 4096), torch.bfloat16), 7)]}
    expected = NumberTable(list(cases.values())).numbers()
    moved = [
        [box._replace(tensor=with_strides(box.tensor, "cuda")) for box in boxes]
        for boxes in cases.values()
    ]
    table = NumberTable(moved)
    table.start()  # compiles
    torch.cuda.synchronize()
    with no_waiting():
        (started,) = table.start()
        (once,) = NumberTable(moved).start()
    assert torch.equal(started, once)
    found = [value & (1 << 64) - 1 for value in started.tolist()]
    assert dict(zip(cases, found, strict=True)) == dict(zip(cases, expected, strict=True))


@pytest.mark.gpu
def test_a_trainer_on_a_gpu_has_a_cpu_s_numbers_and_names_what_is_not_finite():
    from support.plans import BLOCKWISE, PER_CHANNEL, PLAIN, make_plan

    from sglang_fp8rl.trainer.fingerprint import fingerprint_of

    shapes = {"a": (BLOCKWISE, (256, 384)), "b": (PER_CHANNEL, (96, 160)), "c": (PLAIN, (7, 33))}
    plan = make_plan(shapes)
    sent = {name: torch.randn(shape) for name, (_, shape) in shapes.items()}
    on_gpu = {name: one.cuda() for name, one in sent.items()}
    found, expected = (fingerprint_of(one.items(), plan).numbers for one in (on_gpu, sent))
    assert found == expected
    on_gpu["a"][200, 300] = torch.nan
    with pytest.raises(QuantizationError, match=r"a: NaN or Inf in block \(1, 2\)"):
        fingerprint_of(on_gpu.items(), plan)
