"""Towers whose size SGLang has in its code, whatever a config says: cut to a few layers, which are all of a kind."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

from .layers import LEAST as LAYERS

_PARSER = "sglang.srt.utils.hf_transformers.config"
_OF_TIMM = "sglang.srt.models.deepseek_vl2.DeepseekVL2ForCausalLM._init_vision_module"


def cut_towers() -> None:
    """Side effects on the host: two functions of SGLang's give smaller towers, in this process."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(_OF_TIMM, cut_blocks, HookType.AFTER)
    if find_spec(_PARSER):  # older versions have it elsewhere
        HookRegistry.register(f"{_PARSER}.HfModelConfigParser.parse", cut_config, HookType.AFTER)


def cut_blocks(tower: Any, *_: Any, **__: Any) -> Any:
    """Of DeepSeek-VL2."""
    tower.blocks = tower.blocks[:LAYERS]
    return tower


def cut_config(config: Any, *_: Any, **__: Any) -> Any:
    """Of Phi-4-multimodal."""
    if config.architectures == ["Phi4MMForCausalLM"]:
        config.vision_config.num_hidden_layers = LAYERS
    return config
