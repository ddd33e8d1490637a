"""What an update may not carry: each check answers with tensor, value, rule and remedy."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from ...errors import RefitError, listed, near_matches
from ..model.parameters import Target


def check_dtype(target: Target, name: str, loaded: torch.Tensor) -> None:
    """Raises `RefitError` for a dtype that is neither the parameter's own nor one we cast."""
    if loaded.dtype == target.parameter.dtype:
        return
    raise RefitError(
        name,
        f"dtype {loaded.dtype} for {target.name} ({target.parameter.dtype})",
        "weights come in FP32, BF16 or FP16, or in float8_e4m3fn where the module is FP8",
        "Convert it on the trainer; `sglang-fp8rl plan` says which modules take FP8.",
    )


def check_takes_scale(target: Target, name: str) -> None:
    """Raises `RefitError` for a scale of a module that is not quantized."""
    if not target.is_fp8:
        raise RefitError(
            name,
            f"a scale for {target.name} ({target.parameter.dtype})",
            "this module is served in high precision and has no scale",
            "Send its weight in BF16 or FP32; `sglang-fp8rl plan` says which modules take FP8.",
        )


def foreign_error(name: str, error: Exception, known: Iterable[str]) -> RefitError:
    """What SGLang's `load_weights` raised by itself, as an error that says at which tensor.

    Args:
        name: that it was given last.
        known: names that were stored before.
    """
    if isinstance(error, KeyError) and name not in known:
        return unknown_names_error([name], known)
    return RefitError(
        name or "load_weights",
        f"{type(error).__name__}: {error}",
        "SGLang's load_weights of this model could not take it",
        "Send the tensor as the checkpoint has it.",
    )


def outside_of_a_call(name: str) -> RefitError:
    """A write that belongs to no update."""
    return RefitError(
        name,
        "a weight_loader called outside model.load_weights",
        "every write has to belong to an update, or its scale could be left behind",
        "Send the tensor through model.load_weights or an update_weights_from_* call.",
    )


def unknown_names_error(unknown: list[str], known: Iterable[str]) -> RefitError:
    """`known`: names that were stored before, as trainers and checkpoints write them."""
    return RefitError(
        listed(unknown),
        f"{len(unknown)} name(s) that no parameter takes",
        "every tensor sent has to land somewhere",
        near_matches(unknown[0], known)
        + "Set unknown_names='warn' in quantization_config to let them pass.",
    )


def not_finite_errors(found: list[tuple[str, torch.Tensor]]) -> dict[str, str]:
    """One line per tensor with a NaN or Inf. Synchronizes with the device once."""
    if not found:
        return {}
    any_bad = torch.stack([bad.any() for _, bad in found]).cpu().tolist()
    lines = {}
    for (name, bad), is_bad in zip(found, any_bad, strict=True):
        if is_bad:
            count = int(bad.sum())
            first = bad.nonzero()[0].tolist()
            lines[name] = (
                f"{name}: NaN or Inf in {count} of {bad.numel()} block(s), first at {first}; "
                "a block that is not finite keeps its old bytes. Mend the weight and send it again"
            )
    return lines


def homeless_scales_error(names: list[str]) -> RefitError:
    """Scales of a KV cache that this server has not, or of a layer that this model has not."""
    return RefitError(
        listed(names),
        f"{len(names)} scale(s) of a KV cache",
        "this server has no layer of that name whose cache is scaled",
        "Serve with --kv-cache-dtype fp8_e4m3 and kv_scales='sent' in quantization_config to use them; "
        "otherwise leave them out of the update.",
    )
