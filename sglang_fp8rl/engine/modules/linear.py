"""The linear method: SGLang's FP8 buffers and kernels, with the scheme decided by shape."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.layers.parameter import ChannelQuantScaleParameter, ModelWeightParameter
from sglang.srt.layers.quantization.fp8 import Fp8Config, Fp8LinearMethod
from sglang.srt.layers.quantization.fp8_utils import (
    apply_fp8_linear,
    deepgemm_w8a8_block_fp8_linear_with_fallback,
)
from sglang.srt.layers.quantization.unquant import UnquantizedLinearMethod

from ...errors import ConfigError, HostError
from ...scheme import misalignment
from .decisions import DecidedMethod, Decisions
from .packed_scales import takes_packed_scales


class Fp8BlockwiseOnlineLinearMethod(DecidedMethod, Fp8LinearMethod):
    """W8A8 linear layer whose FP8 weight is written by quantizing what its loader loads.

    One instance serves one layer. Blockwise layers are allocated, post-processed and run by
    SGLang's own code; per-channel layers keep the loader's `[N, K]` layout and hand the
    kernel a transposed view, so no pointer moves.
    """

    weight_leaves = ("weight",)

    def __init__(self, quant_config: Fp8Config, decisions: Decisions, prefix: str) -> None:
        super().__init__(quant_config, decisions, prefix)
        if self.use_marlin:
            raise HostError(
                prefix,
                "SGLang chose Marlin weight-only FP8 for this GPU",
                "Marlin repacks the weight, so it can't be written in place",
                "Use a GPU of compute capability 8.9 or newer, and unset SGLANG_FORCE_FP8_MARLIN.",
            )
        self.created_with: dict[str, Any] = {}

    def create_weights(
        self,
        layer: Any,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        """Decide the scheme, then allocate `weight` and its scale.

        Side effects on the host: registers on `layer` an FP8 `weight` `[N, K]` with an FP32
        `weight_scale_inv` `[ceil(N/128), ceil(K/128)]` (blockwise) or an FP32 `weight_scale`
        `[N, 1]` (per channel), or a `weight` of `params_dtype` (misaligned and `bf16`).
        """
        self.created_with = {
            "input_size_per_partition": input_size_per_partition,
            "output_partition_sizes": output_partition_sizes,
            "input_size": input_size,
            "output_size": output_size,
            "params_dtype": params_dtype,
            **extra_weight_attrs,
        }
        options = self.decisions.options
        reason = misalignment(
            input_size=input_size,
            input_size_per_partition=input_size_per_partition,
            output_size=output_size,
            output_partition_sizes=output_partition_sizes,
            block_size=options.weight_block_size,
        )
        if reason and options.misaligned == "error" and options.granularity == "blockwise":
            # Raised when the model is built: a vision tower is not quantized after all.
            self.decisions.refused[self.prefix] = ConfigError(
                self.prefix,
                reason,
                "misaligned='error' allows no fallback",
                "Set misaligned to 'per_channel' or 'bf16', add the module to ignored_layers, or "
                "use another tensor-parallel size.",
            )
        self.decide(reason)
        if self.block_quant:
            super().create_weights(layer, **self.created_with)
            # A scale that was never written has to be seen, not multiplied with.
            layer.weight_scale_inv.data.fill_(float("nan"))
        else:
            weight_loader = extra_weight_attrs.get("weight_loader")
            self._create_unblocked_weights(
                layer, input_size_per_partition, output_partition_sizes, params_dtype, weight_loader
            )

    def _create_unblocked_weights(
        self,
        layer: Any,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        params_dtype: torch.dtype,
        weight_loader: Any,
    ) -> None:
        assert self.fp8rl_scheme is not None
        self.weight_block_size = None  # SGLang asks it what `w_kc` and `w_vc` are derived from
        rows = sum(output_partition_sizes)
        layer.logical_widths = output_partition_sizes
        layer.input_size_per_partition = input_size_per_partition
        layer.output_size_per_partition = rows
        layer.orig_dtype = params_dtype
        dtype = torch.float8_e4m3fn if self.fp8rl_scheme.is_fp8 else params_dtype
        weight = ModelWeightParameter(
            data=torch.empty(rows, input_size_per_partition, dtype=dtype),
            input_dim=1,
            output_dim=0,
            weight_loader=weight_loader,
        )
        layer.register_parameter("weight", weight)
        if self.fp8rl_scheme.is_fp8:
            scale = ChannelQuantScaleParameter(
                data=torch.full((rows, 1), float("nan"), dtype=torch.float32),
                output_dim=0,
                weight_loader=weight_loader,
            )
            layer.register_parameter("weight_scale", scale)
        layer.register_parameter("input_scale", None)

    def process_weights_after_loading(self, layer: Any) -> None:
        """Idempotent: SGLang calls it after the first load and at the end of every session."""
        if not self.block_quant:
            return
        if self.reads_packed_scales(layer):
            self.derive(layer)
        else:
            super().process_weights_after_loading(layer)

    def reads_packed_scales(self, layer: Any) -> bool:
        """Whether this layer's kernel takes its scales as exponents; only powers of two are any."""
        if not self.block_quant:
            return False
        runner: Any = self.w8a8_block_fp8_linear
        is_deepgemm = (
            getattr(runner, "func", runner) is deepgemm_w8a8_block_fp8_linear_with_fallback
        )
        return is_deepgemm and takes_packed_scales(layer, layer.weight, is_moe=False)

    def apply(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """`x [..., K]` in `params_dtype` to `[..., N]`, by SGLang's kernel for the scheme."""
        assert self.fp8rl_scheme is not None
        if self.block_quant:
            return super().apply(self.served or layer, x, bias)
        if not self.fp8rl_scheme.is_fp8:
            return UnquantizedLinearMethod().apply(layer, x, bias)
        return apply_fp8_linear(
            input=x,
            weight=layer.weight.t(),
            weight_scale=layer.weight_scale,
            input_scale=None,
            bias=bias,
            cutlass_fp8_supported=self.cutlass_fp8_supported,
            use_per_token_if_dynamic=True,
        )
