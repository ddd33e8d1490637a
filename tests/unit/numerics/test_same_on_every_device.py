"""Plain torch gives the same bytes on every device and in every version of torch.

Without a GPU: no operation is done that is known to differ. With one: the bytes are the CPU's.
"""

from __future__ import annotations

import importlib
import inspect
import math
import pkgutil
from typing import Any

import pytest
import torch
from support.numerics.numerics_cases import bits
from support.numerics.public_calls import Calls
from torch.utils._python_dispatch import TorchDispatchMode

from sglang_fp8rl import numerics, trainer
from sglang_fp8rl.numerics.kv_bounds import _row_sums, _square_root
from sglang_fp8rl.trainer import served_weights

# What computes nothing with tensors, is compared elsewhere, or is on its way in these.
NO_NUMBERS = {
    "as_matrix", "exact_range", "form_as_served", "has_kernel", "is_there", "kernels", "keys", "seed_of",
    "refuse_dtype", "refuse_not_finite", "smallest_exponent", "added_up", "full_tensors", "like", "shard_of", "check_compute_dtype", "is_below",
    "lent_weight", "plain_name", "rules_of", "compute_as_served", "compute_as_stored", "plan_of",
    "served_modules", "served_rules", "lies_in_memory",
}  # fmt: skip
# Those with matrix products in them, whose last digits are a device's, and tables of kernels.
COMPARED_ELSEWHERE = {
    "doubled": "test_doubled.py",
    "linear": "test_linear_triton.py",
    "make_runner": "test_triton_table.py",
    "check_as_served": "test_served_weights_run.py",
}
DIVISIONS = {"div", "div_", "divide", "divide_", "true_divide", "true_divide_"}
# Rounded otherwise, or multiplied with a reciprocal, somewhere.
REFUSED = {
    "reciprocal", "reciprocal_", "mean", "var", "std", "rsqrt", "exp", "exp2", "log", "log2", "addcdiv",
    "addcdiv_", "_foreach_div", "sqrt", "sqrt_", "_foreach_div_", "mm", "bmm", "addmm", "dot", "linalg_vector_norm", "cumsum",
}  # fmt: skip


class ExactEverywhere(TorchDispatchMode):
    """Refuses operations whose bytes depend on the device or on torch's version."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        out = func(*args, **(kwargs or {}))
        assert name not in REFUSED, f"{func}: not the same on every device"
        if name in DIVISIONS:
            divisor = args[1]
            # A tensor without dimensions may lie on the host; one that has some lies where the other does.
            assert isinstance(divisor, torch.Tensor), f"{func} by the number {divisor}"
            assert divisor.dim() > 0, f"{func} by a tensor without dimensions"
        if name in ("sum", "prod") and out.is_floating_point():
            assert args[0].numel() <= 2 * out.numel(), f"{func}: its order is the device's"
        written = args[0] if name == "copy_" else out
        source = args[1] if name == "copy_" else args[0] if args else None
        if name in ("copy_", "_to_copy") and _is_fp8(written) and not _is_fp8(source):
            too_large = source.float().abs() > numerics.FP8_MAX
            assert not bool(too_large.any()), f"{func}: {int(too_large.sum())} values above 448"
        return out


def _is_fp8(tensor: torch.Tensor) -> bool:
    return tensor.dtype == numerics.FP8_DTYPE


def test_no_public_function_does_what_differs_between_devices():
    calls = Calls("cpu", "reference")
    with ExactEverywhere():
        calls.run()


@pytest.mark.parametrize(
    "differs",
    [
        lambda x: x / 448.0,
        lambda x: x.div_(448),
        lambda x: x / torch.tensor(448.0),
        lambda x: x.reciprocal(),
        lambda x: x.double().sqrt(),
        lambda x: x.mean(),
        lambda x: x.sum(1),
        lambda x: (x * 1e6).to(numerics.FP8_DTYPE),
        lambda x: torch.zeros(x.shape, dtype=numerics.FP8_DTYPE).copy_(x * 1e6),
    ],
)
def test_what_differs_is_seen(differs):
    with pytest.raises(AssertionError), ExactEverywhere():
        differs(torch.ones(4, 4))


def test_every_public_function_is_called_here():
    called = {name.removeprefix("call_") for name in dir(Calls) if name.startswith("call_")}
    known = called | NO_NUMBERS | set(COMPARED_ELSEWHERE)
    found = {name for module in _modules() for name in _functions_of(module)}
    assert found - known == set()
    assert known - found == set()


def _modules() -> list[Any]:
    return [
        importlib.import_module(f"{package.__name__}.{one.name}")
        for package in (numerics, trainer, served_weights)
        for one in pkgutil.iter_modules(package.__path__)
        if not one.ispkg
    ]


def _functions_of(module: Any) -> list[str]:
    def is_ours(value: Any) -> bool:
        made = inspect.unwrap(getattr(value, "_init_fn", value))
        return inspect.isfunction(made) and made.__module__ == module.__name__

    return [name for name, value in vars(module).items() if name[0] != "_" and is_ours(value)]


def test_a_root_is_the_nearest_number():
    values = torch.rand(1000, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    assert _square_root(values).tolist() == [math.sqrt(one) for one in values.tolist()]


@pytest.mark.parametrize("columns", [1, 2, 3, 7, 384, 1001])
def test_rows_are_added_up_in_one_order(columns):
    values = torch.randn(5, columns, generator=torch.Generator().manual_seed(1)).double()
    before = values.clone()
    assert torch.allclose(_row_sums(values), values.sum(1), rtol=1e-13, atol=1e-13)
    assert torch.equal(_row_sums(values)[3:], _row_sums(values[3:].clone()))
    assert torch.equal(values, before)


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["reference", "auto", "triton"])
def test_a_gpu_gives_the_bytes_of_a_cpu(backend):
    expected = Calls("cpu", "reference").run()
    found = Calls("cuda", backend).run()
    for name, results in expected.items():
        assert len(results) == len(found[name])
        for number, (wanted, got) in enumerate(zip(results, found[name], strict=True)):
            if isinstance(wanted, torch.Tensor):
                same = got.shape == wanted.shape and torch.equal(
                    bits(got.cpu().contiguous()), bits(wanted.contiguous())
                )
            else:
                same = got == wanted
            assert same, (name, number)
