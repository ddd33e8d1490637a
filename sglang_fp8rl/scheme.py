"""How a module is stored, decided once, from its shape and its parallel layout only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum


class Granularity(str, Enum):
    """What shares one scale."""

    BLOCKWISE = "blockwise"  # one scale per [block_n, block_k] block
    PER_CHANNEL = "per_channel"  # one scale per row of the local shard
    HIGH_PRECISION = "high_precision"  # not quantized


class Cause(str, Enum):
    """Why a module has its granularity."""

    ALIGNED = "aligned"  # its shard consists of whole blocks
    MISALIGNED = "misaligned"  # it does not
    ASKED = "asked"  # an option says so: granularity, ignored_layers, first or last layers
    VISION_TOWER = "vision_tower"
    WRITTEN = "written"  # its model computes in its weight while it runs


@dataclass(frozen=True)
class Scheme:
    """A module's granularity, and what decided."""

    granularity: Granularity
    cause: Cause
    reason: str  # the value and the rule that decided, in words; empty for blockwise
    # An FP8 module's activations stay in BF16: nothing that is stored depends on it.
    keeps_activations: bool = False

    @property
    def is_fp8(self) -> bool:
        return self.granularity is not Granularity.HIGH_PRECISION

    @property
    def activations(self) -> str:
        """`fp8` or `bf16`, as the plan says it."""
        return "fp8" if self.is_fp8 and not self.keeps_activations else "bf16"


def misalignment(
    *,
    input_size: int,
    input_size_per_partition: int,
    output_size: int,
    output_partition_sizes: Sequence[int],
    block_size: tuple[int, int],
) -> str:
    """Why a linear layer's local shard can't be cut into blocks; empty if it can.

    The first two rules are SGLang's own (`Fp8LinearMethod.validate_block_quant_shapes`), which
    raises where this answers. The third is its kernels': activations are quantized in groups of
    `block_k` columns, and a group may not be cut short. A last block of *rows* may be short.

    Args:
        output_size: rows of the unsharded weight, as SGLang counts them (replicated KV heads
            counted once per rank that holds them).
        output_partition_sizes: rows of each logical matrix fused into this rank's shard.
        block_size: `[block_n, block_k]`.
    """
    block_n, block_k = block_size
    if input_size_per_partition != input_size and input_size_per_partition % block_k:
        return (
            f"input_size_per_partition {input_size_per_partition} is not a multiple of "
            f"block_k {block_k} (row-parallel shard of {input_size})"
        )
    if sum(output_partition_sizes) != output_size or len(output_partition_sizes) > 1:
        for size in output_partition_sizes:
            if size % block_n:
                return (
                    f"output_partition_size {size} of {list(output_partition_sizes)} is not a "
                    f"multiple of block_n {block_n}"
                )
    if input_size_per_partition % block_k:
        return (
            f"input_size {input_size_per_partition} is not a multiple of block_k {block_k} "
            f"(activations are quantized in groups of {block_k})"
        )
    return ""


def expert_misalignment(
    *, hidden_size: int, intermediate_size_per_partition: int, block_size: tuple[int, int]
) -> str:
    """Why one expert's shard can't be cut into blocks; empty if it can. All of a layer have one shape.

    SGLang's rule in `Fp8MoEMethod.create_weights`, and the activation groups of its kernels.
    """
    block_n, block_k = block_size
    if intermediate_size_per_partition % block_n or intermediate_size_per_partition % block_k:
        return (
            f"moe intermediate size {intermediate_size_per_partition} per rank is not a multiple "
            f"of the block {[block_n, block_k]}"
        )
    if hidden_size % block_k:
        return f"hidden size {hidden_size} is not a multiple of block_k {block_k}"
    return ""


def decide_scheme(
    why_misaligned: str,
    misaligned: str,
    granularity: str = Granularity.BLOCKWISE.value,
    *,
    keeps_activations: bool = False,
) -> Scheme:
    """The scheme of a module that is to be quantized.

    Args:
        why_misaligned: what `misalignment` or `expert_misalignment` answered.
        misaligned, granularity: the options of these names; `per_channel` is a granularity whatever the shape.
        keeps_activations: options leave its activations in BF16.
    """
    cause, reason = Cause.MISALIGNED, why_misaligned
    stored = Granularity.HIGH_PRECISION if misaligned == "bf16" else Granularity.PER_CHANNEL
    if granularity == Granularity.PER_CHANNEL.value:
        stored, cause = Granularity.PER_CHANNEL, Cause.ASKED
        reason = f"granularity={granularity!r}"
    elif not why_misaligned:
        stored, cause = Granularity.BLOCKWISE, Cause.ALIGNED
    return Scheme(stored, cause, reason, keeps_activations)


def module_rows(schemes: Mapping[str, Scheme]) -> list[dict[str, str]]:
    """One row for each linear module, in the order they were built: plain types, for a plan or a status."""
    return [
        {
            "module": name,
            "scheme": scheme.granularity.value,
            "cause": scheme.cause.value,
            "reason": scheme.reason,
            "activations": scheme.activations,
        }
        for name, scheme in schemes.items()
    ]
