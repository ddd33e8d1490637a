"""What two models hold, byte for byte."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from sglang_fp8rl.engine.model.parameters import held_tensors


def differences(model: Any, fresh: Any) -> Iterator[str]:
    """Places whose bytes, or plain values, are not the same in both."""
    found, expected = _held(model), _held(fresh)
    yield from found.keys() ^ expected.keys()
    for place in found.keys() & expected.keys():
        if not is_same(found[place], expected[place]):
            yield place


def differences_of_plain(refit: Any, plain: Any) -> Iterator[str]:
    """Weights in high precision that are not what SGLang's own loader makes of the same tensors."""
    expected = dict(plain.named_parameters()) | dict(plain.named_buffers())
    for target in refit.targets.values():
        other = expected.get(target.name)
        one = target.parameter
        is_alike = other is not None and (one.shape, one.dtype) == (other.shape, other.dtype)
        if not target.is_fp8 and is_alike and not is_same(one.data, other.data):
            yield target.name


def _held(model: Any) -> dict[str, Any]:
    """Parameters, buffers, every other tensor, and numbers that modules keep."""
    found: dict[str, Any] = {one.place: one.tensor for one in held_tensors(model.named_modules())}
    for prefix, module in model.named_modules():
        for leaf, value in vars(module).items():
            if isinstance(value, (bool, int, float)):
                found[f"{prefix}.{leaf}"] = value
    return found


def is_same(one: Any, other: Any) -> bool:
    """Bit for bit; a NaN that is a plain value is itself."""
    if not isinstance(one, torch.Tensor):
        return one == other or (one != one and other != other)
    if (one.shape, one.dtype, one.device) != (other.shape, other.dtype, other.device):
        return False
    if one.device.type == "meta":
        return True
    return torch.equal(_bytes(one), _bytes(other))


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)
