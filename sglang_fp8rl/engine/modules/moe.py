"""The fused-experts method: SGLang's FP8 expert buffers and runners, scheme decided by shape."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from sglang.srt.layers.moe.fused_moe_triton import FusedMoeWeightScaleSupported
from sglang.srt.layers.moe.moe_runner.triton import TritonMoeQuantInfo
from sglang.srt.layers.moe.token_dispatcher.standard import StandardCombineInput
from sglang.srt.layers.moe.utils import get_moe_runner_backend
from sglang.srt.layers.quantization.fp8 import Fp8MoEMethod
from sglang.srt.utils import set_weight_attrs

from ...errors import ConfigError
from ...scheme import expert_misalignment
from .built import experts_may_move
from .experts import DoubledExperts, unmade
from .method import DecidedMethod, check_misaligned, takes_packed_scales

_KEPT = "activations in BF16"


class Fp8BlockwiseOnlineMoEMethod(DecidedMethod, Fp8MoEMethod):
    """Experts whose FP8 weights are written by quantizing what their loader loads.

    Blockwise experts are allocated, post-processed and run by SGLang's own code. Experts whose
    shard fails alignment are stored per channel and run by SGLang's Triton runner
    (`per_channel_quant`), the path of its channel-wise FP8 checkpoints.
    """

    weight_leaves = ("w13_weight", "w2_weight")

    def create_weights(
        self,
        layer: Any,
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        """Decide the scheme, then allocate `w13_weight`, `w2_weight` and their scales.

        Side effects on the host: registers on `layer` FP8 weights `[E, 2I, H]` and `[E, H, I]` with
        FP32 `*_weight_scale_inv` (one per 128×128 block) or `*_weight_scale` (`[E, rows, 1]`).

        Raises:
            ConfigError: experts that can't be served as asked.
        """
        if extra_weight_attrs.get("with_bias"):
            raise ConfigError(
                self.prefix,
                "experts with biases (gpt-oss)",
                "they are published in MXFP4, and no FP8 path of this method carries their biases",
                "Serve the model with its own quantization, or add the module to ignored_layers.",
            )
        options = self.quant_config.options
        reason = expert_misalignment(
            hidden_size=hidden_size,
            intermediate_size_per_partition=intermediate_size_per_partition,
            block_size=options.weight_block_size,
        )
        check_misaligned(self.prefix, self.decide(reason), options.misaligned, ("per_channel",))
        sizes = (num_experts, hidden_size, intermediate_size_per_partition)
        if self.block_quant:
            super().create_weights(layer, *sizes, params_dtype, **extra_weight_attrs)
        else:
            self._create_whole(layer, *sizes, **extra_weight_attrs)
        for leaf in self.weight_leaves:
            # A scale that was never written has to be seen, not multiplied with.
            getattr(layer, self.held.scale_name(leaf)).data.fill_(float("nan"))

    def _create_whole(
        self,
        layer: Any,
        num_experts: int,
        hidden_size: int,
        intermediate_size: int,
        **extra_weight_attrs: Any,
    ) -> None:
        shards = 2 if layer.moe_runner_config.is_gated else 1
        attributes = extra_weight_attrs | {
            "quant_method": FusedMoeWeightScaleSupported.CHANNEL.value
        }
        for name, rows, columns in (
            ("w13", shards * intermediate_size, hidden_size),
            ("w2", hidden_size, intermediate_size),
        ):
            weight = torch.empty(num_experts, rows, columns, dtype=torch.float8_e4m3fn)
            shape = (num_experts, *self.held.grid(weight.shape).scale_shape)
            scale = torch.empty(shape, dtype=torch.float32)
            for leaf, data in (
                (f"{name}_weight", weight),
                (self.held.scale_name(f"{name}_weight"), scale),
            ):
                parameter = torch.nn.Parameter(data, requires_grad=False)
                layer.register_parameter(leaf, parameter)
                set_weight_attrs(parameter, attributes)
            setattr(layer, f"{name}_input_scale", None)

    def create_moe_runner(self, layer: Any, moe_runner_config: Any) -> None:
        """SGLang's choice of a runner; called after `create_weights`.

        Raises:
            ConfigError: it can't read the scheme, or not of experts on several ranks, of those that move, or
                with activations in BF16.
        """
        super().create_moe_runner(layer, moe_runner_config)
        # Of `fp8`, SGLang refuses this by its name.
        if get_moe_runner_backend().is_cutlass() and getattr(layer, "moe_ep_size", 1) > 1:
            raise ConfigError(
                self.prefix,
                f"--moe-runner-backend cutlass with {layer.moe_ep_size} expert-parallel ranks",
                "SGLang's CUTLASS experts in FP8 are for one expert-parallel rank only",
                "Leave --moe-runner-backend out, or use --ep-size 1.",
            )
        if self.reads_packed_scales(layer) and experts_may_move():
            raise ConfigError(
                self.prefix,
                "DeepGEMM experts on Blackwell with --enable-eplb or --elastic-ep-backend",
                "experts move with their parameters, and scales packed beside those would stay behind",
                "Leave the option out, or start with --moe-runner-backend triton.",
            )
        runner = getattr(self, "runner", None)  # CUTLASS is called without one
        backend = get_moe_runner_backend() if runner is None else runner.runner_backend
        is_triton = runner is not None and backend.is_triton()
        by = "" if is_triton else f"the MoE runner {backend.value!r}"
        if by and not self.block_quant:
            raise self._refused(f"one scale a row ({self.fp8rl_scheme.reason})", by)
        if self.fp8rl_scheme.keeps_activations:
            if by := by or unmade(moe_runner_config):
                raise self._refused(_KEPT, by)
            self._doubled = DoubledExperts(moe_runner_config)

    def _refused(self, wanted: str, by: str) -> ConfigError:
        return ConfigError(
            self.prefix,
            f"experts with {wanted}, and {by}",
            "only SGLang's Triton runner reads one scale a row, and only its steps can be called one by one: "
            "for SiLU and GELU, and without adapters",
            "Start with --moe-runner-backend triton (and an --moe-a2a-backend that it runs with) and no "
            "adapters of experts, or use another tensor-parallel or expert-parallel size, or leave "
            "activations='bf16' out and name modules that are no experts in bf16_activations.",
        )

    def process_weights_after_loading(self, layer: Any) -> None:
        """Idempotent: SGLang calls it after the first load and at the end of every session."""
        if self.block_quant and not self.reads_packed_scales(layer):
            super().process_weights_after_loading(layer)
            return
        self.derive(layer)
        # As SGLang's version does at its end: what tokens are sent in to other ranks depends on it.
        if hasattr(layer, "dispatcher"):
            layer.dispatcher.set_quant_config(
                {"weight_dtype": layer.w13_weight.dtype, "use_mxfp8": self.use_mxfp8}
            )

    def reads_packed_scales(self, layer: Any) -> bool:
        if not self.is_deepgemm_moe_runner_backend_enabled():
            return False
        return takes_packed_scales(layer, layer.w13_weight, self.weight_block_size, is_moe=True)

    def apply(self, layer: Any, dispatch_output: Any) -> Any:
        if not self.fp8rl_scheme.keeps_activations:
            return super().apply(self.served or layer, dispatch_output)
        x, topk = dispatch_output.hidden_states, dispatch_output.topk_output
        info = self.get_triton_quant_info(layer, doubled=True)
        return StandardCombineInput(self._doubled.run(x, topk, info))

    def get_triton_quant_info(self, layer: Any, *, doubled: bool = False) -> TritonMoeQuantInfo:
        """What SGLang's Triton runner needs; per channel as its channel-wise checkpoints ask.

        Raises:
            ConfigError: its runner would quantize activations that stay in BF16, as LoRA of experts does.
        """
        if self.fp8rl_scheme.keeps_activations and not doubled:
            raise self._refused(_KEPT, "an adapter (LoRA)")
        info = super().get_triton_quant_info(layer)
        return replace(info, per_channel_quant=not self.block_quant)
