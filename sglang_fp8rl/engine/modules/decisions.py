"""What is asked of one model's modules, and what was decided for each while SGLang built them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from ...config import Options
from ...errors import ConfigError
from ...scheme import Granularity, Scheme, decide_scheme
from .packed_scales import ServedWithPackedScales


@dataclass
class Decisions:
    """Shared by the configuration and the methods of one model.

    Attributes:
        options: of the user.
        schemes: of every module that has a method of ours, by full name, in building order.
        refused: modules that can't be served as asked; the start fails with the first one, unless the
            built model shows that the module stays in high precision (`vision_towers.py`).
    """

    options: Options
    schemes: dict[str, Scheme] = field(default_factory=dict)
    refused: dict[str, ConfigError] = field(default_factory=dict)

    def record(self, module: str, scheme: Scheme) -> None:
        """The scheme that `module` is served with; the latest counts."""
        self.schemes[module] = scheme

    def leave_in_high_precision(self, module: str, scheme: Scheme) -> None:
        """`module` is not quantized after all, so nothing about it can be refused."""
        self.refused.pop(module, None)
        self.record(module, scheme)

    def raise_refused(self) -> None:
        """Fail for the first module that can't be served as asked.

        Raises:
            ConfigError: as recorded.
        """
        for error in self.refused.values():
            raise error


class DecidedMethod:
    """What the methods of linear layers and of experts have in common.

    In front of SGLang's own method among the bases of ours.

    Args:
        quant_config: the model's configuration, as SGLang's own methods read it.
        decisions: of the same model; the scheme is recorded there.
        prefix: the module's full name.

    Attributes:
        weight_leaves: names of a layer's FP8 weights.
        reads_packed_scales: whether a layer's kernel takes its scales as exponents; only powers of two are any.
        served: the layer with packed scales, where its kernel reads those.
    """

    weight_leaves: tuple[str, ...]
    block_quant: bool
    reads_packed_scales: Callable[[Any], bool]

    def __init__(self, quant_config: Any, decisions: Decisions, prefix: str) -> None:
        super().__init__(quant_config)  # type: ignore[call-arg]
        self.prefix, self.decisions = prefix, decisions
        self.fp8rl_scheme: Scheme | None = None
        self.served: ServedWithPackedScales | None = None

    def decide(self, why_misaligned: str) -> None:
        """Decide the scheme, and record it."""
        options = self.decisions.options
        self.fp8rl_scheme = decide_scheme(why_misaligned, options.misaligned, options.granularity)
        self.decisions.record(self.prefix, self.fp8rl_scheme)
        self.block_quant = self.fp8rl_scheme.granularity is Granularity.BLOCKWISE

    def derive(self, layer: Any) -> None:
        """At the end of every update: what the kernels read beside the canonical scales."""
        if self.served is not None:
            self.served.derive()
        elif self.reads_packed_scales(layer):
            leaves = [(name, f"{name}_scale_inv") for name in self.weight_leaves]
            self.served = ServedWithPackedScales(layer, leaves, self.prefix)
