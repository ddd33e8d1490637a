"""How a module is stored, decided once, from its shape and its parallel layout only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from .formats import FORMATS, Format

HIGH_PRECISION = "high_precision"  # the name of the scheme of what is not quantized


class Cause(str, Enum):
    """Why a module has its format, or none."""

    ALIGNED = "aligned"  # its shard consists of whole blocks
    MISALIGNED = "misaligned"  # it does not
    ASKED = "asked"  # an option says so: granularity, ignored_layers, first or last layers
    VISION_TOWER = "vision_tower"
    WRITTEN = "written"  # its model computes in its weight while it runs


@dataclass(frozen=True)
class Scheme:
    """A module's format (none in high precision), and what decided."""

    format: Format | None
    cause: Cause
    reason: str  # the value and the rule that decided, in words; empty for blockwise
    # An FP8 module's activations stay in BF16: nothing that is stored depends on it.
    keeps_activations: bool = False

    @property
    def name(self) -> str:
        return self.format.name if self.format else HIGH_PRECISION

    @property
    def is_fp8(self) -> bool:
        return self.format is not None


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
    """
    block_n, block_k = block_size
    if input_size_per_partition != input_size and input_size_per_partition % block_k:
        return (
            f"input_size_per_partition {input_size_per_partition} is not a multiple of "
            f"block_k {block_k} (row-parallel shard of {input_size})"
        )
    is_cut = sum(output_partition_sizes) != output_size or len(output_partition_sizes) > 1
    for size in output_partition_sizes if is_cut else ():
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
    """Why one expert's shard can't be cut into blocks; empty if it can. All of a layer have one shape. It is SGLang's rule
    in `Fp8MoEMethod.create_weights`, and the activation groups of its kernels."""
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
    why_misaligned: str, misaligned: str, granularity: str, *, keeps_activations: bool = False
) -> Scheme:
    """The scheme of a module that is to be quantized: by what `misalignment` or `expert_misalignment` answered, and the
    options `misaligned` and `granularity`, formats for what is misaligned, if any, and for the rest."""
    asked = FORMATS[granularity]
    if asked.takes_any_shape:
        return Scheme(asked, Cause.ASKED, f"granularity={granularity!r}", keeps_activations)
    if not why_misaligned:
        return Scheme(asked, Cause.ALIGNED, "", keeps_activations)
    return Scheme(FORMATS.get(misaligned), Cause.MISALIGNED, why_misaligned, keeps_activations)


def module_rows(schemes: Mapping[str, Scheme]) -> list[dict[str, str]]:
    """One row for each linear module, in the order they were built: plain types, for a plan or a status."""
    return [
        {
            "module": name,
            "scheme": scheme.name,
            "cause": scheme.cause.value,
            "reason": scheme.reason,
            "activations": "fp8" if scheme.is_fp8 and not scheme.keeps_activations else "bf16",
        }
        for name, scheme in schemes.items()
    ]
