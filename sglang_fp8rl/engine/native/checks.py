"""What a sent tensor has to be for the parameter it is for, and what is said of those that were not stored."""

from __future__ import annotations

import functools
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from itertools import compress
from typing import Any

import torch

from ...errors import RefitError, is_of_an_adapter, listed, remedy_for_unknown
from ..arrival.sent_tensors import Source
from ..interception import Write
from ..model.landings import Known, Landing
from ..model.parameters import Target

Sent = tuple[str, torch.Tensor]
_FLOAT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# SGLang's loader of Mamba2: where ranks share a group, they have more rows together than the checkpoint.
_REPEATS_A_GROUP = "mamba_v2_sharded_weight_loader."
_INTEGER_DTYPES = (
    *(torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.uint8, torch.uint16, torch.uint32, torch.uint64),
)
_WHOLE_DTYPES = (*_INTEGER_DTYPES, torch.bool)


def check_dtype(target: Target, name: str, loaded: torch.Tensor) -> None:
    """Raises `RefitError` for a dtype that is neither the parameter's own nor one we cast."""
    if loaded.dtype in _FLOAT_DTYPES or loaded.dtype == target.parameter.dtype:
        return
    if target.parameter.dtype in _WHOLE_DTYPES:
        return  # `check_integers` looks at the values
    raise RefitError(
        name,
        f"dtype {loaded.dtype} for {target.name} ({target.parameter.dtype})",
        "weights come in FP32, BF16 or FP16, or in float8_e4m3fn where the module is FP8",
        "Convert it on the trainer; `sglang-fp8rl plan` says which modules take FP8.",
    )


def check_integers(target: Target, name: str, write: Write) -> None:
    """Raises `RefitError` for what an integer parameter can't hold as it is. Waits for a GPU.

    A float of 16 bits is refused whatever its value: BF16 has no odd integers beyond 256, so what was an id
    there is another one by now.
    """
    dtype = target.parameter.dtype
    if dtype not in _WHOLE_DTYPES:
        return
    source = write.values(target.parameter)
    if source.dtype == dtype:
        return
    least, most = (
        (0, 1) if dtype == torch.bool else (torch.iinfo(dtype).min, torch.iinfo(dtype).max)
    )
    wide = source.double()
    is_held = (wide == wide.trunc()) & (wide >= least) & (wide < most + 1.0)
    bad = wide[~is_held]
    if len(bad) or source.dtype not in (*_INTEGER_DTYPES, torch.float32, torch.float64):
        raise RefitError(
            name,
            f"{source.dtype}" + (f" with a value of {bad[0].item()!r}" if len(bad) else ""),
            f"{target.name} holds {dtype}, which come in any integer dtype or as whole numbers in FP32 or FP64",
            "Send the integers as the trainer has them; the old values were kept.",
        )


def has_fewer_bits(sent: Source, target: Target) -> bool:
    """Whether numbers that differ as they are served may have come as one: an FP32 router's bias in BF16."""
    return _is_coarser(sent.dtype, target.parameter.dtype)


@functools.cache
def _is_coarser(one: torch.dtype, other: torch.dtype) -> bool:
    if not (one.is_floating_point and other.is_floating_point):
        return False
    return torch.finfo(one).eps > torch.finfo(other).eps


def check_landing(sources: Sequence[Source], target: Target, known: Mapping[str, Known]) -> None:
    """Raises `RefitError` for a tensor that goes where it did not go at the start.

    SGLang's LFM2 writes the embedding into the head too, where a call brings the first and not the second.
    """
    for source in sources:
        if landings := landings_elsewhere(source, target, known):
            raise RefitError(
                source.name,
                f"written into {target.name}",
                f"when the model was loaded it was for {landings[0].target.name}; what SGLang does with it depends "
                "on what else comes in a call",
                f"Send it in one call with the tensor that is for {target.name}.",
            )


def landings_elsewhere(source: Source, target: Target, known: Mapping[str, Known]) -> list[Landing]:
    """Where a tensor went at the start, if that was not there."""
    landings = known[source.name].landings if source.name in known else []
    return [] if any(one.target is target for one in landings) else landings


def check_takes_scale(target: Target, name: str) -> None:
    """Raises `RefitError` for a scale of a module that is not quantized."""
    if not target.is_fp8:
        raise RefitError(
            name,
            f"a scale for {target.name} ({target.parameter.dtype})",
            "this module is served in high precision and has no scale",
            "Send its weight in BF16 or FP32; `sglang-fp8rl plan` says which modules take FP8.",
        )


def check_shape(
    target: Target, native: Any, name: str, loaded: torch.Tensor, args: tuple, kwargs: dict
) -> None:
    """Raises `RefitError` for a tensor that SGLang's loaders would cut in silence.

    They `narrow` what they are given.

    Args:
        native: the loader.
        args, kwargs: what the model passed to the loader: the shard id of a fused layer, or the name, shard
            id and number of an expert.
    """
    expected = _full_shape(target, args, kwargs)
    if expected is None or tuple(loaded.shape) == expected:
        return
    is_repeated = getattr(native, "__qualname__", "").startswith(_REPEATS_A_GROUP)
    if is_repeated and tuple(loaded.shape[1:]) == expected[1:] and len(loaded) < expected[0]:
        return
    raise _wrong_shape(name, loaded, f"{target.name} takes", expected)


def of_known_sizes(weights: Iterable[Sent], known: Mapping[str, Known]) -> Iterator[Sent]:
    """Pass on what is sent; raises `RefitError` for a tensor of other sizes than the one of its name at the start.

    Most loaders read a rank's part of whatever they are given, and some fill up what is missing: in silence.
    A dimension of 1 more or less makes no difference.
    """
    for name, tensor in weights:
        expected = known[name].shape if name in known else tensor.shape
        if _sizes(tensor.shape) != _sizes(expected):
            raise _wrong_shape(name, tensor, "this server takes", expected)
        yield name, tensor


def _sizes(shape: Sequence[int]) -> list[int]:
    return [size for size in shape if size != 1]


def _wrong_shape(name: str, tensor: torch.Tensor, who: str, expected: Sequence[int]) -> RefitError:
    return RefitError(
        name,
        f"shape {tuple(tensor.shape)}",
        f"{who} the full, unsharded {tuple(expected)}",
        "Send the tensor as the checkpoint has it; the engine cuts this rank's shard.",
    )


def _full_shape(target: Target, args: tuple, kwargs: dict) -> tuple[int, ...] | None:
    """What has to be sent for a parameter; None where it is not known."""
    from sglang.srt.layers.linear import LinearBase, RowParallelLinear
    from sglang.srt.layers.moe.fused_moe_triton import FusedMoE

    layer, leaf = target.module, target.name.rpartition(".")[2]
    if getattr(layer, "use_presharded_weights", False):
        return None
    if isinstance(layer, FusedMoE):
        is_weight = leaf in ("w13_weight", "w2_weight")
        return _full_expert_shape(target, (*args, *kwargs.values())) if is_weight else None
    if not isinstance(layer, LinearBase) or leaf not in ("weight", "bias"):
        return None
    if args and hasattr(layer, "fp8rl_part_rows"):  # see sent_otherwise.py
        return (layer.fp8rl_part_rows[args[0]], layer.input_size)
    if leaf == "bias" and isinstance(layer, RowParallelLinear):
        return (layer.output_size,)  # whole on every rank; all others are sharded like the rows
    rows = _full_rows(layer, args[0] if args else None)
    if rows is None:
        return None
    # The weight of a depthwise convolution is [rows, 1, k]: SGLang puts the 1 in when the layer is made.
    return (rows,) if leaf == "bias" else (rows, *target.parameter.shape[1:-1], layer.input_size)


def _full_expert_shape(target: Target, given: tuple) -> tuple[int, ...] | None:
    """Of one expert's matrix, or of all experts together (`w13`: gate rows first).

    The parameter's own shape says neither: runners pad and transpose it.
    """
    layer, parameter = target.module, target.parameter
    hidden = layer.hidden_size
    intermediate = parameter.moe_intermediate_size  # type: ignore[attr-defined]  # all ranks', unpadded
    is_together = not any(type(one) is int for one in given)  # no expert's number
    experts = parameter.shape[:1] if is_together else ()
    if "w2" in given:
        return (*experts, hidden, intermediate)
    if "w13" in given:
        rows = 2 * intermediate if layer.moe_runner_config.is_gated else intermediate
        return (*experts, rows, hidden)
    return (intermediate, hidden) if "w1" in given or "w3" in given else None


def _full_rows(layer: Any, shard: Any) -> int | None:
    """Rows of a linear layer, or of these parts of a fused one; None where its parts are not known."""
    from sglang.srt.layers.linear import MergedColumnParallelLinear, QKVParallelLinear

    parts: dict[Any, int]
    if isinstance(layer, QKVParallelLinear):
        heads, kv_heads, size = layer.total_num_heads, layer.total_num_kv_heads, layer.head_size
        v_size = getattr(layer, "v_head_size", size)
        parts = {"q": heads * size, "k": kv_heads * size, "v": kv_heads * v_size}
    elif isinstance(layer, MergedColumnParallelLinear):
        parts = dict(enumerate(layer.output_sizes))
    else:
        return int(layer.output_size) if shard is None else None
    if shard is None:
        return sum(parts.values())
    wanted = shard if isinstance(shard, tuple) else (shard,)
    return sum(parts[one] for one in wanted) if parts.keys() >= set(wanted) else None


# -- what was not stored ----------------------------------------------------------------------------


def foreign_error(name: str, error: Exception, known: Iterable[str]) -> RefitError:
    """What SGLang's `load_weights` raised by itself, behind the tensor that it was given last."""
    if isinstance(error, KeyError) and name not in known:
        return _unknown_names_error([name], known)
    return RefitError(
        name or "load_weights",
        f"{type(error).__name__}: {error}",
        "SGLang's load_weights of this model could not take it",
        "Send the tensor as the checkpoint has it.",
    )


def not_taken_errors(
    names: Sequence[str], set_aside: Container[str], known: Iterable[str]
) -> dict[str, str]:
    """What to say of names that nothing takes, by name.

    Args:
        set_aside: those that are scales of a KV cache.
        known: names that the model takes.
    """
    homeless = [name for name in names if name in set_aside]
    errors = dict.fromkeys(homeless, str(_homeless_scales_error(homeless)))
    others = [name for name in names if name not in set_aside]
    for is_adapter in (False, True):  # what is to be done about them is not the same
        alike = [name for name in others if is_of_an_adapter(name) == is_adapter]
        if alike:
            errors |= dict.fromkeys(alike, str(_unknown_names_error(alike, known)))
    return errors


def _unknown_names_error(unknown: list[str], known: Iterable[str]) -> RefitError:
    """`known`: names that the model takes."""
    return RefitError(
        listed(unknown),
        f"{len(unknown)} name(s) that no parameter takes",
        "every tensor sent has to land somewhere",
        remedy_for_unknown(
            unknown[0],
            known,
            "Set unknown_names='warn' in quantization_config to let them pass.",
        ),
    )


def why_not_finite(place: str, made: torch.Tensor, sources: Sequence[Source]) -> str:
    """What to say of a NaN or Inf in what SGLang made of these tensors; empty if there is none. Waits for a GPU."""
    if not sources or made.is_meta or bool(torch.isfinite(made).all()):
        return ""
    names = ", ".join(source.name for source in sources)
    return f"{names}: NaN or Inf in what SGLang makes of it for {place}"


def not_finite_errors(found: list[tuple[str, torch.Tensor]]) -> dict[str, str]:
    """One line per tensor with a NaN or Inf. Synchronizes with each device once."""
    lines: dict[str, str] = {}
    for device in {bad.device for _, bad in found}:  # a model may lie on several
        there = [one for one in found if one[1].device == device]
        flags = torch.stack([bad.any() for _, bad in there])
        for name, bad in compress(there, flags.tolist()):
            count = int(bad.sum())
            first = bad.nonzero()[0].tolist()
            lines[name] = (
                f"{name}: NaN or Inf in {count} of {bad.numel()} block(s), first at {first} "
                "(BF16 overflows to Inf from 3.3962e38 on, FP16 from 65520); "
                "a block that is not finite keeps its old bytes. Mend the weight and send it again"
            )
    return lines


def _homeless_scales_error(names: list[str]) -> RefitError:
    """Scales of a KV cache that this server has not, or of a layer that this model has not."""
    return RefitError(
        listed(names),
        f"{len(names)} scale(s) of a KV cache",
        "this server has no layer of that name whose cache is scaled",
        "Serve with --kv-cache-dtype fp8_e4m3 and kv_scales='sent' in quantization_config to use them; "
        "otherwise leave them out of the update.",
    )
