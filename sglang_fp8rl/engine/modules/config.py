"""`--quantization fp8_blockwise_online`: the configuration SGLang asks for a method per layer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from sglang.srt.layers.quantization.base_config import QuantizeMethodBase
from sglang.srt.layers.quantization.fp8 import Fp8Config
from sglang.srt.layers.quantization.unquant import (
    UnquantizedFusedMoEMethod,
    UnquantizedLinearMethod,
)

from ...config import QUANTIZATION_METHOD, ModulePatterns, Options
from ...declared_hooks import check_hooks_in_force
from ...errors import ConfigError, HostError
from ...scheme import Cause, Scheme
from ...versions import HAS_POW2_ACTIVATIONS
from .built import check_and_complete
from .linear import Fp8BlockwiseOnlineLinearMethod
from .moe import Fp8BlockwiseOnlineMoEMethod

# For models that fuse but declare no `packed_modules_mapping`.
_FUSED_PARTS = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
}


class Fp8BlockwiseOnlineConfig(Fp8Config):
    """Options, and what they decided for every module of one model.

    It is an `Fp8Config` that declares an FP8 block checkpoint, so SGLang allocates the buffers,
    picks the kernels and passes its `isinstance` checks as for one. SGLang makes it before it builds a model, so
    this is where a missing hook ends the start.

    Attributes:
        schemes: of every module of the model that was built, by name.

    Raises:
        HostError: a hook that SGLang did not apply, or an option that it can't serve.
    """

    def __init__(
        self,
        options: Options | None = None,
        packed_modules_mapping: Mapping[str, Any] | None = None,
        num_layers: int | None = None,
    ) -> None:
        check_hooks_in_force()
        # SGLang calls this with nothing too; the environment's ignored layers count all the same.
        self.options = Options.from_dict({}) if options is None else options
        asks_for_pow2 = self.options.use_activation_pow2_scale
        if asks_for_pow2 and not HAS_POW2_ACTIVATIONS:
            raise HostError(
                "use_activation_pow2_scale",
                "True",
                "this SGLang has no way to ask its kernels for power-of-two activation scales",
                "Use a newer SGLang (since 0.5.20), or leave the option out.",
            )
        super().__init__(
            is_checkpoint_fp8_serialized=True,
            activation_scheme="dynamic",
            weight_block_size=list(self.options.weight_block_size),
            packed_modules_mapping=dict(packed_modules_mapping or {}),
            **({"scale_fmt": "ue8m0"} if asks_for_pow2 else {}),
        )
        self.schemes: dict[str, Scheme] = {}
        # What `Fp8Config` read from the environment is in `options` too, with stricter matching.
        self.ignored_layers: list[str] = []
        ignored = self.options.ignored_layers + self.options.modules_to_not_convert
        self._ignored = ModulePatterns("ignored_layers", ignored, self._parts_of)
        kept = self.options.bf16_activations
        self._kept = ModulePatterns("bf16_activations", kept, self._parts_of)
        self._num_layers = num_layers

    def _parts_of(self, leaf: str) -> Sequence[str]:
        """Of a fused module; some models (DeepSeek's) tell them when they are built."""
        return {**_FUSED_PARTS, **self.packed_modules_mapping}.get(leaf, ())

    def get_name(self) -> str:
        return QUANTIZATION_METHOD

    @classmethod
    def get_min_capability(cls) -> int:
        """FP8 tensor cores: Ada, Hopper and newer."""
        return 89

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Fp8BlockwiseOnlineConfig:
        """Read the model's `quantization_config`, as `Options.from_dict`."""
        hf_config = config.get("hf_config")
        text_config = getattr(hf_config, "text_config", hf_config)
        return cls(
            Options.from_dict(config),
            config.get("packed_modules_mapping"),
            getattr(text_config, "num_hidden_layers", None),
        )

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> QuantizeMethodBase | None:
        from sglang.srt.layers.linear import LinearBase
        from sglang.srt.layers.moe.fused_moe_triton import FusedMoE

        if not isinstance(layer, (LinearBase, FusedMoE)):
            return None
        # SGLang's prefix is not the path in the model everywhere (Mixtral's lacks `model.`), and
        # options name the prefix: so does the plan.
        layer.fp8rl_prefix = prefix
        is_linear = isinstance(layer, LinearBase)
        reason = self.options.layer_reason(prefix, self._num_layers)
        if patterns := self._ignored.match(prefix):
            reason = f"ignored_layers: {', '.join(patterns)}"
        keeps_activations = self.options.activations == "bf16" or bool(self._kept.match(prefix))
        if reason:
            plain: Any = (
                UnquantizedLinearMethod()
                if is_linear
                else UnquantizedFusedMoEMethod(
                    layer.use_triton_kernels, layer.use_flashinfer_trtllm_moe
                )
            )
            plain.fp8rl_scheme = Scheme(None, Cause.ASKED, reason)
            return plain
        method = Fp8BlockwiseOnlineLinearMethod if is_linear else Fp8BlockwiseOnlineMoEMethod
        return method(self, prefix, keeps_activations)

    def naming(self, layer: Any) -> list[str]:
        """Options that name a quantized layer and did not reach it, if SGLang calls it otherwise."""
        kept = () if layer.quant_method.fp8rl_scheme.keeps_activations else (self._kept,)
        return [one.option for one in (self._ignored, *kept) if one.match(layer.fp8rl_prefix)]

    def get_cache_scale(self, name: str) -> str | None:
        """Some models ask every method under which name it keeps a scale of the KV cache: under none of its own."""
        return None

    def settle(self, model: torch.nn.Module) -> None:
        """What can be said only when SGLang has built the model, before anything is loaded.

        Raises:
            ConfigError, HostError: a module that can't be served as asked, a pattern without one.
        """
        check_and_complete(model, self)
        # A pattern that matches nothing is a typing error, not a wish.
        for named in (self._ignored, self._kept):
            for pattern in named.patterns:
                if pattern not in named.used:
                    raise ConfigError(
                        named.option,
                        repr(pattern),
                        f"matches none of {len(self.schemes)} modules, for example "
                        f"{', '.join(map(repr, [*self.schemes][:3]))}",
                        "Correct the prefix; `sglang-fp8rl plan MODEL` lists them all.",
                    )
