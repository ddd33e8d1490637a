"""The linear method: SGLang's FP8 buffers and kernels, with the scheme decided by shape."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.layers.quantization.fp8 import Fp8LinearMethod
from sglang.srt.layers.quantization.fp8_utils import (
    apply_fp8_linear,
    deepgemm_w8a8_block_fp8_linear_with_fallback,
)
from sglang.srt.layers.quantization.unquant import UnquantizedLinearMethod
from torch.nn import Parameter

from ...errors import HostError
from ...formats import scale_suffixes
from ...numerics.linear import doubled, linear
from ...scheme import Scheme, misalignment
from .method import DecidedMethod, takes_packed_scales

# Values of the option `misaligned` that a linear layer can be served with.
FALLBACKS = ("per_channel", "bf16")


def padded(x: torch.Tensor, width: int) -> torch.Tensor:
    """Tokens to be doubled for a layer of that width, with zeros behind them where that is faster: on 132 multiprocessors DeepGEMM
    takes 65 to 128 rows in one wave of 128×192 tiles (its `get_best_config`), 192 in two and half the time (an H200: docs/gpu.md).
    """
    tokens = x.shape[0]
    if not (32 < tokens <= 64 and 132 * 160 < width <= 132 * 192 and _multiprocessors(x) == 132):
        return x
    return torch.nn.functional.pad(x, (0, 0, 0, 96 - tokens))


def _multiprocessors(x: torch.Tensor) -> int:
    return torch.cuda.get_device_properties(x.device).multi_processor_count


class Fp8BlockwiseOnlineLinearMethod(DecidedMethod, Fp8LinearMethod):
    """Linear layer whose FP8 weight is written by quantizing what its loader loads.

    Blockwise layers are allocated, post-processed and run by SGLang's own code; per-channel layers
    keep the loader's `[N, K]` layout and hand the kernel a transposed view, so no pointer moves.
    Where activations stay in BF16, few tokens get our own kernel, more of them SGLang's with doubled rows.
    """

    weight_leaves = ("weight",)

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
        `[N, 1]` (per channel); or leaves it unquantized (misaligned and `bf16`).

        Raises:
            HostError: SGLang would repack the weight.
        """
        if self.use_marlin:
            raise HostError(
                self.prefix,
                "SGLang chose Marlin weight-only FP8 for this GPU",
                "Marlin repacks the weight, so it can't be written in place",
                "Use a GPU of compute capability 8.9 or newer, and unset SGLANG_FORCE_FP8_MARLIN.",
            )
        sizes: dict[str, Any] = {
            "input_size_per_partition": input_size_per_partition,
            "output_partition_sizes": output_partition_sizes,
            "input_size": input_size,
            "output_size": output_size,
        }
        self._created_with = {**sizes, "params_dtype": params_dtype, **extra_weight_attrs}
        block_size = self.quant_config.options.weight_block_size
        scheme = self.decide(misalignment(**sizes, block_size=block_size))
        if not scheme.is_fp8:
            self.leave_unquantized(layer, scheme)
            return
        held, name = self.held, self.held.scale_name("weight")
        if self.block_quant:
            super().create_weights(layer, **self._created_with)
        else:
            self._create_whole(layer, torch.float8_e4m3fn)
            scale = torch.empty(held.grid(layer.weight.shape).scale_shape, dtype=torch.float32)
            layer.register_parameter(name, Parameter(scale, requires_grad=False))
            layer.register_parameter("input_scale", None)
        # A scale that was never written has to be seen, not multiplied with.
        getattr(layer, name).data.fill_(float("nan"))

    def _create_whole(self, layer: Any, dtype: torch.dtype) -> None:
        """Register a `weight` `[N, K]` that is not cut into blocks, as SGLang's own method does."""
        # SGLang's newer loader is for the parameter classes of quantized layers.
        ours = {"params_dtype": dtype, "weight_loader": layer.weight_loader}
        UnquantizedLinearMethod().create_weights(layer, **self._created_with | ours)

    def leave_unquantized(self, layer: Any, scheme: Scheme) -> None:
        """Give `layer` SGLang's own method for what is not quantized, and a weight of it, in place of ours."""
        for leaf in ("weight", *(f"weight{one}" for one in scale_suffixes()), "input_scale"):
            layer._parameters.pop(leaf, None)
        layer.quant_method = UnquantizedLinearMethod()
        layer.quant_method.fp8rl_scheme = scheme
        self._create_whole(layer, self._created_with["params_dtype"])

    def process_weights_after_loading(self, layer: Any) -> None:
        """Idempotent: SGLang calls it after the first load and at the end of every session."""
        if self.reads_packed_scales(layer):
            self.derive(layer)
        elif self.block_quant:
            super().process_weights_after_loading(layer)

    def _runs_deepgemm(self) -> bool:
        runner: Any = self.w8a8_block_fp8_linear
        return getattr(runner, "func", runner) is deepgemm_w8a8_block_fp8_linear_with_fallback

    def reads_packed_scales(self, layer: Any) -> bool:
        return self._runs_deepgemm() and takes_packed_scales(
            layer, layer.weight, self.weight_block_size, is_moe=False
        )

    def apply(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """`x [..., K]` in `params_dtype` to `[..., N]`, by the kernel for the scheme."""
        if not self.fp8rl_scheme.keeps_activations:
            return self._with_quantized(layer, x, bias)
        options, rows = self.quant_config.options, x.reshape(-1, x.shape[-1])
        scale = getattr(layer, self.held.scale_name("weight"))
        if rows.shape[0] <= options.exact_product_tokens:
            output = linear(rows, layer.weight, scale)
        else:
            tokens, group = rows.shape[0], rows.shape[1] // scale.shape[1]
            is_packed = self.served is not None  # for Blackwell
            # Packed scales go with activations' in powers of two; one scale a token is never one.
            pow2 = self.block_quant and (options.use_activation_pow2_scale or is_packed)
            if self.block_quant and self._runs_deepgemm() and not is_packed:
                rows = padded(rows, layer.weight.shape[0])
            first, rest = self._with_quantized(layer, doubled(rows, group, pow2), None).chunk(2)
            output = (first + rest)[:tokens]
        output = output.view(*x.shape[:-1], output.shape[1])
        return output if bias is None else output + bias

    def _with_quantized(
        self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        """SGLang's product, which quantizes `x`."""
        if self.block_quant:
            return super().apply(self.served or layer, x, bias)
        return apply_fp8_linear(
            x,
            layer.weight.t(),
            getattr(layer, self.held.scale_name("weight")),
            bias=bias,
            cutlass_fp8_supported=self.cutlass_fp8_supported,
            use_per_token_if_dynamic=True,
        )
