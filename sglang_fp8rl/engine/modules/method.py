"""What the methods of linear layers and of experts have in common: a scheme, and packed scales beside it.

On Blackwell DeepGEMM reads a weight's scales as exponents (UE8M0), one byte for every row and 128 columns, four
to an int32, column-major and padded for TMA. SGLang requantizes the FP8 weight once after loading and
replaces the FP32 scales by the packed ones; the next update would find a parameter of another shape.
Here the FP32 scales stay in the parameter, updates write them, and the packed form is derived from them
at the end of every update, into the same memory. Packing loses nothing: the scales are powers of two
(`use_weight_pow2_scale`), so the FP8 bytes are the ones that were quantized.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from ...errors import ConfigError, HostError
from ...formats import Format
from ...scheme import Cause, Scheme, decide_scheme
from ...versions import PACKS_EXPERTS_APART


class DecidedMethod:
    """In front of SGLang's own method among the bases of ours; one instance serves one layer.

    Attributes:
        quant_config: the model's `Fp8BlockwiseOnlineConfig`.
        prefix: what SGLang calls the module; not every model has one of its own for each.
        weight_leaves: names of a layer's FP8 weights.
        reads_packed_scales: whether a layer's kernel takes its scales as exponents; only powers of two are any.
        served: the layer with packed scales, where its kernel reads those.
    """

    weight_leaves: tuple[str, ...]
    block_quant: bool
    weight_block_size: list[int] | None
    quant_config: Any
    reads_packed_scales: Callable[[Any], bool]
    fp8rl_scheme: Scheme

    def __init__(self, quant_config: Any, prefix: str, keeps_activations: bool = False) -> None:
        super().__init__(quant_config)  # type: ignore[call-arg]
        self.prefix, self._keeps_activations = prefix, keeps_activations
        self.served: ServedWithPackedScales | None = None

    def decide(self, why_misaligned: str) -> Scheme:
        """Decide the scheme from the shape, and record it."""
        options = self.quant_config.options
        scheme = decide_scheme(
            why_misaligned,
            options.misaligned,
            options.granularity,
            keeps_activations=self._keeps_activations,
        )
        self.fp8rl_scheme = scheme
        # SGLang asks its own method by these: what allocates and multiplies, what `w_kc` and `w_vc` are derived from.
        self.weight_block_size = scheme.format.weight_block_size if scheme.format else None
        self.block_quant = self.weight_block_size is not None
        return scheme

    @property
    def held(self) -> Format:
        """How the layer's weights are held, which are quantized."""
        assert self.fp8rl_scheme.format is not None
        return self.fp8rl_scheme.format

    def derive(self, layer: Any) -> None:
        """At the end of every update: what the kernels read beside the canonical scales."""
        if self.served is not None:
            self.served.derive()
        elif self.reads_packed_scales(layer):
            names = {leaf: self.held.scale_name(leaf) for leaf in self.weight_leaves}
            self.served = ServedWithPackedScales(layer, names, self.prefix)


def check_misaligned(
    prefix: str, scheme: Scheme, misaligned: str, fallbacks: tuple[str, ...]
) -> None:
    """Raise `ConfigError` for a shape that none of the `fallbacks` of its kind of layer is allowed for."""
    if scheme.cause is Cause.MISALIGNED and misaligned not in fallbacks:
        raise ConfigError(
            prefix,
            scheme.reason,
            f"misaligned={misaligned!r} allows it no fallback",
            f"Set misaligned to {' or '.join(map(repr, fallbacks))}, add the module to "
            "ignored_layers, or use another tensor-parallel or expert-parallel size.",
        )


def scheme_of(layer: Any) -> Scheme | None:
    """What was decided for a layer; None of what is no such layer."""
    return getattr(getattr(layer, "quant_method", None), "fp8rl_scheme", None)


def format_of(layer: Any) -> Format | None:
    """How a layer's weights are held; None in high precision, and of what is no such layer."""
    scheme = scheme_of(layer)
    return None if scheme is None else scheme.format


def takes_packed_scales(
    layer: Any, weight: torch.Tensor, weight_block_size: list[int] | None, *, is_moe: bool
) -> bool:
    """SGLang's own decision, for a layer whose runner is DeepGEMM; False where there are no blocks."""
    from sglang.srt.model_loader.utils import should_deepgemm_weight_requant_ue8m0

    options: dict[str, Any] = {
        "output_dtype": torch.bfloat16 if is_moe else getattr(layer, "orig_dtype", None),
        "weight_shape": weight.shape[-2:],
    }
    if PACKS_EXPERTS_APART:
        options["grouped_moe"] = is_moe
    return should_deepgemm_weight_requant_ue8m0(weight_block_size, **options)


class ServedWithPackedScales:
    """A layer as SGLang's kernels see it: everything is the layer's, its scales are packed.

    Attributes:
        packed: scales as the kernels read them, by the names of those in FP32, which updates write.
    """

    def __init__(self, layer: Any, names: Mapping[str, str], module: str) -> None:
        self._layer, self._names, self.module = layer, names, module
        self.packed: dict[str, torch.Tensor] = {}
        self.derive()

    def __getattr__(self, name: str) -> Any:
        return self.packed[name] if name in self.packed else getattr(self._layer, name)

    def derive(self) -> None:
        """Pack the scales as they are now, into the memory they were packed into before.

        Raises:
            HostError: a scale that is not a power of two.
        """
        for weight, name in self._names.items():
            rows, scale = getattr(self._layer, weight).shape[-2], getattr(self._layer, name)
            packed = pack(scale.data, rows, f"{self.module}.{name}")
            packed.format_ue8m0 = True  # type: ignore[attr-defined]
            self.packed.setdefault(name, packed).copy_(packed)


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
