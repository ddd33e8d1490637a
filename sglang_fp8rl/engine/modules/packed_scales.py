"""Power-of-two scales for DeepGEMM on Blackwell: packed beside the canonical ones, never instead.

There DeepGEMM reads a weight's scales as exponents (UE8M0), one byte for every row and 128 columns, four
to an int32, column-major and padded for TMA. SGLang requantizes the FP8 weight once after loading and
replaces the FP32 scales by the packed ones; the next update would find a parameter of another shape.
Here the FP32 scales stay in the parameter, updates write them, and the packed form is derived from them
at the end of every update, into the same memory. Packing loses nothing: the scales are powers of two
(`use_weight_pow2_scale`), so the FP8 bytes are the ones that were quantized.

Proven without a Blackwell GPU: the packed bytes and strides equal those of DeepGEMM's and SGLang's own
packing functions on a CPU, and a second update derives anew. No kernel has read them yet.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import Any

import torch

from ...errors import HostError

BLOCK = 128


def takes_packed_scales(layer: Any, weight: torch.Tensor, *, is_moe: bool) -> bool:
    """SGLang's own decision, for a layer whose runner is DeepGEMM."""
    from sglang.srt.model_loader.utils import should_deepgemm_weight_requant_ue8m0

    options: dict[str, Any] = {
        "output_dtype": torch.bfloat16 if is_moe else getattr(layer, "orig_dtype", None),
        "weight_shape": weight.shape[-2:],
    }
    if "grouped_moe" in inspect.signature(should_deepgemm_weight_requant_ue8m0).parameters:
        options["grouped_moe"] = is_moe
    return should_deepgemm_weight_requant_ue8m0([BLOCK, BLOCK], **options)


class ServedWithPackedScales:
    """A layer as SGLang's kernels see it: everything is the layer's, its scales are packed.

    Args:
        layer: the module; its FP32 scales stay what updates write.
        weights: names of its blockwise weights.
        module: for errors.
    """

    def __init__(self, layer: Any, weights: Iterable[str], module: str) -> None:
        self._layer, self._weights, self._module = layer, tuple(weights), module
        self.derive()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._layer, name)

    def derive(self) -> None:
        """Pack the scales as they are now, into the memory they were packed into before.

        Raises:
            HostError: a scale that is not a power of two.
        """
        for name in self._weights:
            scale_name = f"{name}_scale_inv"
            rows, scale = getattr(self._layer, name).shape[-2], getattr(self._layer, scale_name)
            packed = pack(scale.data, rows, f"{self._module}.{scale_name}")
            kept = vars(self).get(scale_name)
            if kept is None:
                packed.format_ue8m0 = True  # type: ignore[attr-defined]
                setattr(self, scale_name, packed)
            else:
                kept.copy_(packed)


def are_no_exponents(scale: torch.Tensor) -> torch.Tensor:
    """Which FP32 scales packing would change, bool of their shape: those with a mantissa, and NaN."""
    return (scale.view(torch.int32) & 0x007FFFFF) != 0


def pack(scale: torch.Tensor, rows: int, name: str) -> torch.Tensor:
    """FP32 scales of 128×128 blocks as DeepGEMM reads them.

    Args:
        scale: `[..., ceil(rows / 128), K / 128]` FP32 powers of two (NaN where nothing was loaded yet).
        rows: of the weight.

    Returns:
        `[..., rows, ceil(K / 512)]` int32, column-major, its leading stride aligned for TMA.

    Raises:
        HostError: a scale that is not a power of two; packing would change it.
    """
    if bool((are_no_exponents(scale) & ~scale.isnan()).any()):
        raise HostError(
            name,
            "a scale that is not a power of two",
            "DeepGEMM on this GPU reads scales as exponents, and rounding them now would change the "
            "weight",
            "Set use_weight_pow2_scale to true in quantization_config.",
        )
    from sglang.srt.layers.quantization.fp8_utils import transform_scale_ue8m0

    return transform_scale_ue8m0(scale, mn=rows, use_torch_impl=not scale.is_cuda)
