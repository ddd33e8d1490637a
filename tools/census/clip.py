"""A small CLIP tower on disk, for models that read theirs at every load from a directory that their config names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

HAVE_CLIP = r"(Llava(Llama|Mistral|Qwen|Vid)|YiVL)ForCausalLM"
_NAME = "clip"  # SGLang asks the name what it is


def clip_in(path: Path, content: dict[str, Any]) -> str:
    """Write it below `path`; what the model's config has to say of it."""
    import torch
    from transformers import CLIPVisionConfig, CLIPVisionModel

    width = content["mm_hidden_size"]
    config = CLIPVisionConfig(
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=2,
        num_attention_heads=4,
        image_size=56,
        patch_size=14,
    )
    torch.manual_seed(0)
    CLIPVisionModel(config).save_pretrained(path / _NAME)
    is_below = content["architectures"] == ["YiVLForCausalLM"]
    return f"./{_NAME}" if is_below else str(path / _NAME)
