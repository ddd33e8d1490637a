"""A model that SGLang has built, before anything is loaded: what is served otherwise, and what is refused.

*Weights that their model writes while it runs* (Gemma 3n's AltUp) are told by the source of the module's class.

*Vision towers* are told by the types of their modules, not by names: a linear layer belongs to the language model if
it is in a decoder layer, an element of a list of which one element at least attends to the KV cache
(`RadixAttention`). A tower attends within one image (`VisionAttention`), and its projector to nothing.
"""

from __future__ import annotations

import functools
import inspect
import os
import re
from collections import Counter
from typing import Any

import torch

from ...config import LAYER
from ...errors import ConfigError, HostError
from ...scheme import Cause, Scheme
from ...versions import derives_from_row_scales
from .linear import FALLBACKS, Fp8BlockwiseOnlineLinearMethod
from .method import DecidedMethod, check_misaligned, format_of, scheme_of

_TOWER = "not in a decoder layer of a multimodal model: a vision tower or its projector"
_WRITTEN = "its model writes it in place while it runs: FP8 codes are no numbers to compute with"
# A computation in place on the weight of a module's own layer; copies are those of loading.
_IN_PLACE = re.compile(r"self\.(\w+)\.weight(?:\.data)?\.(?!copy_|requires_grad_)[a-z]\w*_\(")
_QUANT_ONCE = "SGLANG_OPT_MOE_QUANT_ONCE"
_FUSED_SWIGLU = "SGLANG_OPT_FUSE_SWIGLU_INTERLEAVED"


def check_and_complete(model: torch.nn.Module, config: Any) -> None:
    """Leave vision towers and what a model writes unquantized, and refuse what can't be served or updated.

    Side effects on the host: these layers get SGLang's `UnquantizedLinearMethod` and a weight of
    it; `DualGemm` is turned off, and so is `fused_qkv_index_proj`.

    Raises:
        ConfigError, HostError: naming the first module or option.
    """
    from sglang.srt.layers.attention.vision import VisionAttention

    _check_layout()
    if any(isinstance(module, VisionAttention) for module in model.modules()):
        _leave_vision_towers(model)
    _leave_what_its_model_writes(model)
    config.schemes.update(_named_schemes(model))
    _check_names(model, config)
    for prefix, scheme in config.schemes.items():  # of what is quantized for sure by now
        check_misaligned(prefix, scheme, config.options.misaligned, FALLBACKS)
    _check_one_product(config)
    _check_quantized_once(model)
    _leave_fusions(model)
    _check_derivable(model)
    check_no_copies_of_the_start(model)
    check_no_experts_turned(model)


# -- what is served otherwise ----------------------------------------------------------------------


def _leave_vision_towers(model: torch.nn.Module) -> None:
    decoders = _in_decoder_layers(model)
    for layer in model.modules():
        if layer not in decoders:
            _leave(layer, Cause.VISION_TOWER, _TOWER)


def _leave(layer: Any, cause: Cause, reason: str) -> None:
    """Leave it in high precision if it is a linear layer."""
    from sglang.srt.layers.linear import LinearBase

    scheme = scheme_of(layer)
    if scheme is None or not isinstance(layer, LinearBase):
        return
    if scheme.is_fp8 or scheme.cause is not Cause.ASKED:
        scheme = Scheme(None, cause, reason)
    if isinstance(layer.quant_method, Fp8BlockwiseOnlineLinearMethod):
        layer.quant_method.leave_unquantized(layer, scheme)
    else:
        layer.quant_method.fp8rl_scheme = scheme


def _leave_what_its_model_writes(model: torch.nn.Module) -> None:
    for module in model.modules():
        kind: Any = type(module)
        for name in _written_in_place(kind):
            _leave(getattr(module, name, None), Cause.WRITTEN, _WRITTEN)


@functools.cache
def _written_in_place(kind: type) -> list[str]:
    """Names of layers in whose weight modules of this class compute in place."""
    try:
        return _IN_PLACE.findall(inspect.getsource(kind))
    except (OSError, TypeError):  # a class that no file has
        return []


def _in_decoder_layers(model: torch.nn.Module) -> set[torch.nn.Module]:
    from sglang.srt.layers.radix_attention import RadixAttention

    found: set[torch.nn.Module] = set()
    for layers in model.modules():
        if isinstance(layers, torch.nn.ModuleList):
            modules = set(layers.modules())
            if any(isinstance(module, RadixAttention) for module in modules):
                found |= modules
    return found


def _leave_fusions(model: torch.nn.Module) -> None:
    """Run some layers one by one that SGLang fuses on a GPU.

    The gate and up projection of an MLP (Blackwell): its fused kernel takes any `Fp8LinearMethod` without blocks
    for its own, would read `[N, K]` as `[K, N]`, and quantize activations whatever the options say. Projections of
    MiniMax-M3's sparse attention that stay in BF16: joined behind their load, they leave updates no weight to write.
    """
    for module in model.modules():
        method = getattr(getattr(module, "gate_up_proj", None), "quant_method", None)
        fused = getattr(module, "dual_gemm", None)
        if fused is not None and isinstance(method, Fp8BlockwiseOnlineLinearMethod):
            fused.mode = None
        if hasattr(module, "_fuse_qkv_index_enabled"):
            module._fuse_qkv_index_enabled = False  # type: ignore[assignment]


def _named_schemes(model: torch.nn.Module) -> dict[str, Scheme]:
    """By SGLang's prefix, or by the path in the model where that is no name of it alone: Phi gives none, HunYuan the same
    in every layer. What a module is called from now on is its `fp8rl_prefix`."""
    paths = {layer: path for path, layer in model.named_modules() if scheme_of(layer)}
    uses = Counter([layer.fp8rl_prefix for layer in paths]) + Counter(
        [path for layer, path in paths.items() if path != layer.fp8rl_prefix]
    )
    for layer, path in paths.items():
        if not layer.fp8rl_prefix or uses[layer.fp8rl_prefix] > 1:
            layer.fp8rl_prefix = path
    return {layer.fp8rl_prefix: layer.quant_method.fp8rl_scheme for layer in paths}


# -- what is refused -------------------------------------------------------------------------------


def experts_may_move() -> bool:
    """Whether SGLang balances experts over ranks while serving."""
    from sglang.srt.runtime_context import get_server_args

    args = get_server_args()
    return bool(args.enable_eplb or args.elastic_ep_backend)


def _check_layout() -> None:
    """Refuse pipeline parallelism: ranks compare what they found within one stage, and the first answers."""
    from sglang.srt.runtime_context import get_parallel

    stages = get_parallel().pp_size
    if stages > 1:
        raise ConfigError(
            "--pp-size",
            str(stages),
            "an update that fails in a stage behind the first would be answered as a success: no other "
            "stage answers requests",
            "Start with --pp-size 1 and a larger --tp-size.",
        )


def _check_names(model: torch.nn.Module, config: Any) -> None:
    """Refuse options that miss a module for what SGLang calls it: the plan names it otherwise, or layers by a number."""
    numbers = ("num_first_layers_in_bf16", "num_last_layers_in_bf16")
    counted = [option for option in numbers if getattr(config.options, option)]
    quantized: list[Any] = [*filter(format_of, model.modules())]
    decoders = _in_decoder_layers(model)
    for layer in quantized:
        name, called = layer.fp8rl_prefix, layer.quant_method.prefix
        is_numbered = layer not in decoders or LAYER.search(called)
        for option in (*(() if is_numbered else counted), *config.naming(layer)):
            raise ConfigError(
                option,
                f"SGLang calls {name} {called!r}",
                "that is what options are held against, and this one misses it",
                "Cover that too, with `re:` in a list of patterns, or leave the option out.",
            )


def _check_one_product(config: Any) -> None:
    """Refuse a product for few tokens and another for more where batches may not change a result."""
    from sglang.srt.runtime_context import get_server_args

    kept = any(scheme.keeps_activations for scheme in config.schemes.values())
    most, args = config.options.exact_product_tokens if kept else 0, get_server_args()
    # The second switches the first on, but not in the arguments.
    if most and (args.enable_deterministic_inference or args.rl_on_policy_target):
        raise ConfigError(
            "exact_product_tokens",
            f"{most} with --enable-deterministic-inference or --rl-on-policy-target",
            "a larger batch gets another product of activations in BF16, whose last bits differ",
            "Set it to 0: every batch gets SGLang's product.",
        )


def _check_quantized_once(model: torch.nn.Module) -> None:
    """Refuse that shared experts are handed quantized activations where their method takes none."""
    for name, module in model.named_modules() if _is_on(_QUANT_ONCE) else ():
        method: Any = getattr(getattr(module, "gate_up_proj", None), "quant_method", None)
        is_ours = isinstance(method, DecidedMethod) and name.endswith("shared_experts")
        if is_ours and (method.fp8rl_scheme.keeps_activations or not method.block_quant):
            raise ConfigError(
                f"{name}.gate_up_proj",
                _QUANT_ONCE,
                "SGLang would hand it activations in FP8, with a scale for each group of 128",
                "Leave it out.",
            )


def _is_on(variable: str) -> bool:
    """As SGLang reads a switch of the environment."""
    return os.environ.get(variable, "").lower() in ("true", "1", "yes", "y")


def _check_derivable(model: torch.nn.Module) -> None:
    """Refuse a `kv_b_proj` in FP8 without blocks, where this SGLang would read its scales as those of blocks."""
    if derives_from_row_scales():
        return
    for name, module in model.named_modules():
        method: Any = getattr(getattr(module, "kv_b_proj", None), "quant_method", None)
        if isinstance(method, DecidedMethod) and method.weight_block_size is None:
            raise HostError(
                f"{name}.kv_b_proj",
                method.fp8rl_scheme.reason,
                "this SGLang derives w_kc and w_vc from blocks only",
                "Add kv_b_proj to ignored_layers, or use a newer SGLang (since 0.5.23).",
            )


def check_no_copies_of_the_start(model: torch.nn.Module) -> None:
    """Refuse `--dcp-replicate-q-proj`, which models of DeepSeek's family take by default under DCP.

    `q_b_proj` and `w_kc` of all ranks are gathered once, before graphs are captured, and no update path
    renews these copies. (DSpark keeps an FP8 copy of `lm_head` on ROCm, where SGLang takes no method of a
    plugin.)
    """
    from sglang.srt.runtime_context import get_parallel

    if not getattr(get_parallel(), "dcp_replicate_q_proj", False):
        return
    for name, module in model.named_modules():
        if "w_kc_qrep" in vars(module):
            raise ConfigError(
                f"{name}.w_kc_qrep",
                "--dcp-replicate-q-proj",
                "these copies of q_b_proj and w_kc are made once, at the start; after an update, decoding "
                "would use the old ones",
                "Start with --no-dcp-replicate-q-proj.",
            )


def check_no_experts_turned(model: torch.nn.Module) -> None:
    """Refuse what has SGLang interleave gate and up rows of experts once, behind their first load.

    MegaMoE does so to codes and scales, `SGLANG_OPT_FUSE_SWIGLU_INTERLEAVED` to experts left in BF16.
    """
    from sglang.srt.layers.moe.fused_moe_triton import FusedMoE
    from sglang.srt.runtime_context import get_server_args

    name = next((name for name, one in model.named_modules() if isinstance(one, FusedMoE)), None)
    if name is None:
        return
    args = get_server_args()
    options = {
        "--moe-a2a-backend": str(args.moe_a2a_backend),
        "--moe-runner-backend": str(args.moe_runner_backend),
    }
    turned = [f"{option} {value}" for option, value in options.items() if "megamoe" in value]
    if _is_on(_FUSED_SWIGLU):
        turned.append(_FUSED_SWIGLU)
    if turned:
        raise ConfigError(
            name,
            turned[0],
            "gate and up rows of experts are interleaved once, behind the first load; an update would "
            "write them in the checkpoint's order",
            "Leave it out.",
        )
