"""The fingerprint's GPU kernel: the numbers of the definition, one read in wide loads."""

from __future__ import annotations

import os
import subprocess
import sys

import fingerprint_in_interpreter
import pytest
import torch

pytest.importorskip("triton")

from sass import compile_kernel

from sglang_fp8rl.numerics import fingerprint as definition
from sglang_fp8rl.numerics.triton import fingerprint as kernels

TYPES = dict.fromkeys(("row_keys", "column_keys", "partial"), "*i64") | {
    "units": "*i32", "rows": "i32", "width": "i32", "stride": "i32"
}  # fmt: skip


def test_the_interpreter_gives_the_numbers_of_the_definition():
    result = subprocess.run(
        [sys.executable, fingerprint_in_interpreter.__file__],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr


@pytest.mark.gpu
def test_hardware_gives_the_numbers_of_the_definition():
    assert fingerprint_in_interpreter.differing("cuda") == []


@pytest.mark.gpu
def test_a_tensor_on_the_gpu_has_the_number_of_its_copy_on_the_cpu():
    for _, matrix in fingerprint_in_interpreter.matrices(torch.bfloat16):
        assert definition.tensor_number(matrix.cuda(), 7) == definition.tensor_number(matrix, 7)


@pytest.mark.parametrize("capability", [80, 90, 100])
def test_bytes_are_read_once_in_wide_loads(capability):
    constants = {
        "ROWS": kernels.ROWS,
        "ROWS_AT_ONCE": kernels.ROWS_AT_ONCE,
        "CHUNK": kernels.CHUNK,
        "ALIGN": 4,
    }
    code = compile_kernel(
        kernels.rows_number_kernel, constants, capability, TYPES, num_warps=kernels.WARPS
    )
    of_a_thread = kernels.ROWS_AT_ONCE * kernels.CHUNK * kernels.UNIT // (32 * kernels.WARPS)
    keys = 16 * kernels.CHUNK // (32 * kernels.WARPS)  # of its columns, read once per program
    assert code.widths("LDG")[16] * 16 <= of_a_thread + keys
    assert code.widths("LDG")[16] * 16 >= of_a_thread
    assert code.widths("LDG")[4] == 0
    assert code.spilled == 0
    # Loops count once: an eighth of the rows, and what a program does once.
    assert len(code.executed) <= 5.5 * of_a_thread


@pytest.mark.parametrize(
    ("shape", "dtype", "cut", "is_read"),
    [
        ((8, 64), torch.bfloat16, 0, True),
        ((8, 64), torch.bfloat16, 2, True),
        ((8, 64), torch.bfloat16, 1, False),  # rows begin with the second word of a unit
        ((8, 63), torch.bfloat16, 0, False),  # rows end in the middle of a unit
        ((1, 62), torch.bfloat16, 0, True),
        ((8, 64), torch.float8_e4m3fn, 2, False),
    ],
)
def test_what_does_not_lie_on_units_is_left_to_torch(shape, dtype, cut, is_read):
    matrix = torch.zeros(shape, dtype=torch.float32).to(dtype)[:, cut:]
    assert definition.lies_on(kernels.UNIT, matrix, cut * matrix.element_size()) is is_read
