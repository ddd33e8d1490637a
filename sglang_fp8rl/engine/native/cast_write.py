"""One write into an FP8 parameter: cast its source straight into its region, scales into theirs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from ...config import Options
from ...errors import RefitError
from ...numerics import cast_into
from ...numerics.grid import ScaleGranularity, granularity_of
from ..interception.writes import Region, Write
from ..model.parameters import Target

# (source, codes, scales) of one matrix, and its blocks that were not finite.
Cast = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def quantize_write(target: Target, name: str, write: Write, options: Options) -> Iterator[Cast]:
    """Cast FP32, BF16 or FP16 through BF16 to FP8, matrix by matrix (a 3-D source holds experts).

    No staging copy and no second copy of the weight: source views are read, served bytes written.

    Yields:
        per matrix what was cast and a bool tensor of blocks that kept their old bytes.

    Raises:
        RefitError: the write does not consist of whole blocks (or rows) of a matrix.
    """
    region, source = write.region, write.source
    assert target.scale is not None
    assert source is not None
    if region is None or source.shape[-2:] != region.shape[-2:]:
        raise RefitError(
            name,
            f"a write of shape {write.shape}, strides {write.stride} into {target.name}",
            "a quantized write covers whole rows and columns of one matrix",
            "Send the tensor as the checkpoint has it.",
        )
    codes = write.destination(target.parameter)
    granularity = granularity_of(target.granularity, options.weight_block_size)
    rounding: Any = {
        "pow2_scale": options.use_weight_pow2_scale,
        "round_to_bf16": options.round_to_bf16,
    }
    scales = scales_of(target, name, region, granularity)
    for one_source, one_codes, part in zip(matrices(source), matrices(codes), scales, strict=True):
        arguments = (one_source.to(codes.device), one_codes, part)
        yield (*arguments, cast_into(*arguments, granularity, name=name, **rounding))


def scales_of(
    target: Target, name: str, region: Region, granularity: ScaleGranularity
) -> list[torch.Tensor]:
    """The scales of each matrix of a region, which has to consist of whole blocks."""
    assert target.scale is not None
    scales = target.scale.data
    if scales.dim() == 3:  # one matrix per expert
        scales = scales[region.start[0] : region.start[0] + region.shape[0]]
    grid = granularity.grid(target.parameter.shape)
    start, shape = region.start[-2:], region.shape[-2:]
    if not grid.is_whole(start, shape):
        raise RefitError(
            name,
            f"a write to {region} of {target.name}",
            f"it starts or ends inside a {target.granularity.value} scale's block",
            "Add the module to ignored_layers, or use another tensor-parallel size.",
        )
    part = grid.scales_of(start, shape, name=name)
    return [one[part] for one in matrices(scales)]


def matrices(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """A matrix, or each expert's."""
    return tensor.unbind(0) if tensor.dim() == 3 else (tensor,)
