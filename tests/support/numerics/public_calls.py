"""Every public function of `numerics` and `trainer` that computes with tensors, called once on a device.

Sources are adversarial, so that a step that differs between devices or torch versions shows.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from sglang_fp8rl import numerics, trainer
from sglang_fp8rl.formats.format import BlockGrid
from sglang_fp8rl.numerics import backends, kv_bounds
from sglang_fp8rl.numerics import cast as casts
from sglang_fp8rl.numerics import fingerprint as fingerprints
from sglang_fp8rl.numerics import reference as definition
from sglang_fp8rl.trainer import served_weights, shards
from sglang_fp8rl.trainer.served_weights import modules as served_modules
from support.numerics.numerics_cases import CASES, destination
from support.plans import BLOCKWISE, PER_CHANNEL, PLAIN, make_plan

ROUNDINGS = [{"pow2_scale": pow2, "round_to_bf16": not pow2} for pow2 in (False, True)]
PLAN = make_plan(
    {
        "a.weight": (BLOCKWISE, (300, 256)),
        "b.weight": (PER_CHANNEL, (70, 96)),
        "norm.weight": (PLAIN, (96,)),
    }
)
NAMES = [
    "a distribution per tile", "zero block with negative zeros", "every amax of a binade",
    "amax / 448 is subnormal", "all the largest bf16", "fp16 subnormals", "fp16", "127x257",
    "transposed bf16", "not finite",
]  # fmt: skip


def _not_finite() -> torch.Tensor:
    x = CASES["127x257"].clone()
    x[3, 4], x[100, 200], x[120, 256] = float("inf"), -float("inf"), 3.3962e38
    return x


SOURCES = {name: CASES.get(name, _not_finite()) for name in NAMES}


@contextmanager
def default_backend(backend: str) -> Iterator[None]:
    """Functions that take none use this one: "auto" or "reference"."""
    before = dict(backends._FASTEST)
    if backend == "reference":
        backends._FASTEST.clear()
    backends.kernels.cache_clear()
    try:
        yield
    finally:
        backends._FASTEST.update(before)
        backends.kernels.cache_clear()


class _Model(nn.Module):
    def __init__(self, weights: dict[str, torch.Tensor]) -> None:
        super().__init__()
        for name, tensor in weights.items():
            leaf = nn.Linear(1, 1, bias=False)
            leaf.weight = nn.Parameter(tensor)
            self.add_module(name.removesuffix(".weight"), leaf)


class Calls:
    """The calls, by the function's name; each returns tensors and numbers."""

    def __init__(self, device: str, backend: str) -> None:
        self.device, self.backend = device, backend
        self.sources = [one.to(device) for one in SOURCES.values()]  # strides as they are
        generator = torch.Generator().manual_seed(11)
        self.weights = {
            name: torch.randn(entry.shape, generator=generator).to(device)
            for name, entry in PLAN.tensors.items()
        }
        self.codes, self.scales = numerics.quantize_blockwise(CASES["127x257"])
        self.codes, self.scales = self.codes.to(device), self.scales.to(device)

    def run(self) -> dict[str, list[Any]]:
        found = {}
        with default_backend(self.backend):
            for name in dir(self):
                if name.startswith("call_"):
                    found[name.removeprefix("call_")] = list(getattr(self, name)())
        return found

    def _casts(self, function: Callable[..., Any], *, finite: bool = True) -> Iterator[Any]:
        sources = self.sources[: -1 if finite else None]
        for source, rounding in itertools.product(sources, ROUNDINGS):
            yield from _flat(function(source, **rounding))

    def call_cast_into(self) -> Iterator[Any]:
        for size in ((128, 128), None, (64, 32)):
            for source, rounding in itertools.product(self.sources, ROUNDINGS):
                block = size or (1, source.shape[1])
                shape = BlockGrid.of(source.shape, block).scale_shape
                outer, codes, rim, scales = destination(*source.shape, shape, self.device)
                options = {**rounding, "backend": self.backend}
                flags = casts.cast_into(source, codes, scales, block, **options)
                yield from (outer, rim, flags)

    def call_through_fp8(self) -> Iterator[Any]:
        for size in ((128, 128), None):
            through = self._by_blocks(casts.through_fp8, size)
            yield from self._casts(through, finite=False)

    def _by_blocks(self, cast: Callable[..., Any], size: tuple[int, int] | None) -> Any:
        """Without a size by rows."""
        return lambda source, **rounding: cast(
            source, size or (1, source.shape[1]), backend=self.backend, **rounding
        )

    def call_quantize(self) -> Iterator[Any]:
        for size in ((128, 128), None, (3, 5)):
            yield from self._casts(self._by_blocks(casts.quantize, size))

    def call_quantize_blockwise(self) -> Iterator[Any]:
        return self._casts(casts.quantize_blockwise)

    def call_quantize_per_channel(self) -> Iterator[Any]:
        return self._casts(casts.quantize_per_channel)

    def call_amax_to_scale_inv(self) -> Iterator[Any]:
        every = torch.arange(0, 0x7F80, dtype=torch.int32).to(self.device) << 16
        for pow2 in (False, True):
            yield definition.amax_to_scale_inv(every.view(torch.float32), pow2)

    def call_dequantize(self) -> Iterator[Any]:
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            yield definition.dequantize(self.codes, self.scales, dtype=dtype)

    def call_has_nan_code(self) -> Iterator[Any]:
        yield casts.has_nan_code(self.codes)

    def call_copy_finite_into(self) -> Iterator[Any]:
        dtypes = (torch.float32, torch.bfloat16, torch.float16)
        for source, dtype in itertools.product(self.sources, dtypes):
            out = torch.full(source.shape, 3.0, dtype=dtype, device=self.device)
            yield casts.copy_finite_into(source, out, backend=self.backend)
            yield out

    def call_tensor_number(self) -> Iterator[Any]:
        for source in (*self.sources, self.codes):
            yield fingerprints.tensor_number(source, 3)
        box = fingerprints.Box(self.codes[5:, 3:], tuple(self.codes.shape), (5, 3), 3)
        whole = fingerprints.whole(self.scales, 4)
        yield fingerprints.NumberTable([[box], [whole, box]]).numbers()

    def call_whole(self) -> Iterator[Any]:
        yield fingerprints.whole(self.codes, 3).full_shape

    def call_scaled_boxes(self) -> Iterator[Any]:
        box = (tuple(self.codes.shape), (0, 0), (128, 128))
        yield fingerprints.NumberTable(
            [fingerprints.scaled_boxes("w", self.codes, [self.scales], *box)]
        ).numbers()

    def call_by_torch(self) -> Iterator[Any]:
        yield fingerprints.by_torch(self.codes, 2, 0, 3, fingerprints.keys(1, 0, 200))

    def call_projected(self) -> Iterator[Any]:
        weights = torch.randn(200, 384, generator=torch.Generator().manual_seed(2)) * 0.05
        gain = torch.linspace(0.1, 3, 384)
        for quantize in (numerics.quantize_blockwise, numerics.quantize_per_channel):
            rows = [one.to(self.device) for one in quantize(weights)]
            yield kv_bounds.projected(kv_bounds.Rows(*rows), gain.to(self.device))
        wide = kv_bounds.Rows(weights.to(self.device), bias=weights[:, 0].to(self.device))
        yield kv_bounds.projected(wide, gain.to(self.device))

    def call_rotated(self) -> Iterator[Any]:
        bound = torch.linspace(0.1, 9, 256, dtype=torch.float64).to(self.device)
        for is_neox in (False, True):
            yield kv_bounds.rotated(bound, kv_bounds.Rotation(64, 32, is_neox, 1.1))

    def call_normed(self) -> Iterator[Any]:
        gain = torch.linspace(-3, 2, 64).to(self.device)
        yield kv_bounds.normed(gain, kv_bounds.Rotation(64, 64, True, 1.1))

    def call_magnitudes(self) -> Iterator[Any]:
        yield kv_bounds.magnitudes(self.sources[:5])

    def call_multiply_by_powers(self) -> Iterator[Any]:
        tensors = [self.weights["a.weight"].clone(), self.weights["b.weight"].bfloat16()]
        kv_bounds.multiply_by_powers(tensors, [5, -7])
        yield from tensors

    def call_quantize_for_refit(self) -> Iterator[Any]:
        for _, tensor in trainer.quantize_for_refit(self.weights.items(), PLAN):
            yield tensor
        nothing = shards.LocalShard(self.weights["a.weight"][:0], (300, 256), (256, 0))
        for _, tensor in trainer.quantize_for_refit([("a.weight", nothing)], PLAN):
            yield tensor.tensor

    def call_fingerprint_of(self) -> Iterator[Any]:
        yield trainer.fingerprint_of(self.weights.items(), PLAN).numbers

    def call_fingerprint_of_served(self) -> Iterator[Any]:
        model = _Model(self.weights)
        served_weights.compute_as_served(model, PLAN)
        yield served_weights.fingerprint_of_served(model).numbers

    def call_served(self) -> Iterator[Any]:
        for name in ("a.weight", "b.weight"):
            block = PLAN.of(name).block_size
            rule = served_modules.WeightRule(name, 1, block, **PLAN.rounding)
            yield served_modules.served(self.weights[name], rule)

    def call_assemble(self) -> Iterator[Any]:
        whole = self.weights["a.weight"]
        parts = [(whole[:128], (0, 0)), (whole[128:], (128, 0))]
        yield shards.assemble("a", [shards.LocalShard(t, (300, 256), at) for t, at in parts])


def _flat(made: Any) -> list[torch.Tensor]:
    return list(made) if isinstance(made, tuple) else [made]
