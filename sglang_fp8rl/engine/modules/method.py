"""What the methods of linear layers and of experts have in common: a scheme, and packed scales beside it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from ...errors import ConfigError
from ...scheme import Granularity, Scheme, decide_scheme
from .packed_scales import ServedWithPackedScales


class DecidedMethod:
    """In front of SGLang's own method among the bases of ours; one instance serves one layer.

    Args:
        quant_config: the model's `Fp8BlockwiseOnlineConfig`; the scheme is recorded there.
        prefix: the module's full name.
        keeps_activations: options leave its activations in BF16.

    Attributes:
        weight_leaves: names of a layer's FP8 weights.
        fallbacks: values of the option `misaligned` that this kind of layer can be served with.
        reads_packed_scales: whether a layer's kernel takes its scales as exponents; only powers of two are any.
        served: the layer with packed scales, where its kernel reads those.
    """

    weight_leaves: tuple[str, ...]
    fallbacks: tuple[str, ...]
    block_quant: bool
    quant_config: Any
    reads_packed_scales: Callable[[Any], bool]

    def __init__(self, quant_config: Any, prefix: str, keeps_activations: bool = False) -> None:
        super().__init__(quant_config)  # type: ignore[call-arg]
        self.prefix, self._keeps_activations = prefix, keeps_activations
        self.fp8rl_scheme: Scheme | None = None
        self.served: ServedWithPackedScales | None = None

    def decide(self, why_misaligned: str) -> Scheme:
        """Decide the scheme from the shape, and record it, or why there is none."""
        config, options = self.quant_config, self.quant_config.options
        falls_back = why_misaligned and options.granularity == Granularity.BLOCKWISE.value
        if falls_back and options.misaligned not in self.fallbacks:
            config.refused[self.prefix] = ConfigError(
                self.prefix,
                why_misaligned,
                f"misaligned={options.misaligned!r} allows it no fallback",
                f"Set misaligned to {' or '.join(map(repr, self.fallbacks))}, add the module to "
                "ignored_layers, or use another tensor-parallel or expert-parallel size.",
            )
        scheme = decide_scheme(why_misaligned, options.misaligned, options.granularity)
        scheme = replace(scheme, keeps_activations=self._keeps_activations and scheme.is_fp8)
        self.fp8rl_scheme = config.schemes[self.prefix] = scheme
        self.block_quant = scheme.granularity is Granularity.BLOCKWISE
        if not self.block_quant:
            self.weight_block_size = None  # SGLang asks it what `w_kc` and `w_vc` are derived from
        return scheme

    def derive(self, layer: Any) -> None:
        """At the end of every update: what the kernels read beside the canonical scales."""
        if self.served is not None:
            self.served.derive()
        elif self.reads_packed_scales(layer):
            self.served = ServedWithPackedScales(layer, self.weight_leaves, self.prefix)
