"""Which config class a model class of SGLang's registry is made from."""

from __future__ import annotations

import functools
import json
import re
import typing
from pathlib import Path
from typing import Any

import transformers

from .arguments import ARGUMENTS, PARTS
from .clip import HAVE_CLIP, clip_in
from .layers import Layers, lost
from .overrides import BASES, KEYS, UNKNOWN, matching
from .tiny import missing, shrink

# A draft is served beside the model whose config it reads.
_DRAFT = re.compile(r"(NextN|MTP|Eagle3?|DSpark)$")
_KIND = re.compile(r"(For[A-Z]\w+|ModelForCausalLM|LMHeadModel|ChatModel|DraftModel|Model|LM)$|_")


def tiny_config(
    architecture: str, model_class: type, path: Path, lacks: list[str], refuses: list[str]
) -> list[str]:
    """Write the `config.json` of a small model of that class into the directory `path`.

    Returns:
        What the real model has and the small one lost (`layers.lost`).

    Args:
        lacks: keys that a model reads, here or in a part of it, and its config class does not have.
        refuses: keys that the config class writes and can't read.
    """
    from transformers import AutoConfig
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    config_class = config_class_of(architecture, model_class)
    if config_class is None:  # one of a model on the hub, in code of its own
        config_class, real = _unknown(), UNKNOWN | _arguments(architecture)
        content = shrink(real)
    else:
        real = config_class(**_arguments(architecture)).to_dict()
        content = shrink(real)
    for key in lacks:
        for part in _parts(content):
            if part.get(key) is None:
                part[key] = missing(key)
    for key in refuses:
        for part in _parts(content):
            part.pop(key, None)
    _apply(content, matching(KEYS, architecture))
    model_type = content.get("model_type") or f"census_{architecture.lower()}"
    if model_type not in CONFIG_MAPPING:
        config_class.model_type = model_type  # type: ignore[attr-defined]
        AutoConfig.register(model_type, config_class)
    content |= {
        "architectures": [architecture],
        "model_type": model_type,
        "torch_dtype": "bfloat16",
    }
    if re.fullmatch(HAVE_CLIP, architecture):
        content["mm_vision_tower"] = clip_in(path, content)
    (path / "config.json").write_text(json.dumps(content, default=str))
    return lost(real, content)


def _arguments(architecture: str) -> dict[str, Any]:
    """Of its config class, or all keys of a config that has none."""
    from sglang.srt.models.registry import ModelRegistry
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    found = dict(matching(ARGUMENTS, architecture))
    for key, whose in matching(PARTS, architecture).items():
        keys = found.get(key, {})
        if whose in CONFIG_MAPPING:
            part = _of_model_type(whose)
        else:
            keys = matching(ARGUMENTS, whose) | {"architectures": [whose]} | keys
            part = config_class_of(whose, ModelRegistry.models.get(whose))
        found[key] = part(**keys).to_dict() if part is not None else UNKNOWN | keys
    return found


def _parts(content: dict[str, Any]) -> list[dict[str, Any]]:
    """All of a config, and the configs in it; one that was lacking and is added counts from then on."""
    inner = [one for key, one in content.items() if key.endswith("_config")]
    return [content, *(one for one in inner if isinstance(one, dict))]


def _apply(content: dict[str, Any], keys: dict[str, Any]) -> None:
    """`keys` into `content`; a part of it where both have a dictionary."""
    for key, value in keys.items():
        if isinstance(value, dict) and isinstance(content.get(key), dict):
            _apply(content[key], value)
        elif value is None:
            content.pop(key, None)
        else:
            content[key] = value


def _unknown() -> type:
    from transformers import PretrainedConfig

    class UnknownConfig(PretrainedConfig):
        """Has what its file has; a part in it is a config too."""

        def __init__(self, **keys: Any) -> None:
            for key, one in keys.items():
                if key.endswith("_config") and isinstance(one, dict) and Layers.of(one):
                    keys[key] = UnknownConfig(**one)
                elif key == "block_configs":
                    keys[key] = [_Readable.of(block) for block in one]
            super().__init__(**keys)

    return UnknownConfig


class _Readable(dict[str, Any]):
    """A part whose keys a model reads as attributes."""

    def __getattr__(self, key: str) -> Any:
        if key not in self:
            raise AttributeError(key)
        return self[key]

    @classmethod
    def of(cls, part: dict[str, Any]) -> _Readable:
        return cls(
            {key: cls.of(one) if isinstance(one, dict) else one for key, one in part.items()}
        )


def config_class_of(architecture: str, model_class: type) -> type | None:
    """From `transformers`, from the model's signature, by its name, or of the model that it drafts for."""
    base = BASES.get(architecture)
    if base == "":
        return None
    if base is not None:
        return getattr(transformers, base, None) or _of_model_type(base)
    model_type = _model_types().get(architecture)
    if model_type is not None:
        return _of_model_type(model_type)
    found = _annotated(model_class) or _named_alike(architecture)
    if found is not None:
        return found
    target = _DRAFT.sub("", architecture)
    return None if target == architecture else config_class_of(target, model_class)


def warm_up() -> None:
    """Import every config class there is."""
    _model_types()
    _config_classes()


@functools.cache
def _model_types() -> dict[str, str]:
    """Architectures that `transformers` has, to the `model_type` of their config."""
    from transformers.models.auto import modeling_auto

    found: dict[str, str] = {}
    for name in dir(modeling_auto):
        if name.endswith("_MAPPING_NAMES"):
            for model_type, classes in getattr(modeling_auto, name).items():
                for one in [classes] if isinstance(classes, str) else classes:
                    found.setdefault(one, model_type)
    return found


def _of_model_type(model_type: str) -> type:
    """SGLang's class, which its own parser prefers; else that of `transformers`."""
    from sglang.srt.utils.hf_transformers.common import _CONFIG_REGISTRY
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    found = _CONFIG_REGISTRY.get(model_type)
    return found if found is not None else CONFIG_MAPPING[model_type]


def _annotated(model_class: type) -> type | None:
    from transformers import PretrainedConfig

    try:
        hint = typing.get_type_hints(model_class.__init__).get("config")
    except (NameError, TypeError, AttributeError):  # of a package that is not here
        return None
    is_config = isinstance(hint, type) and issubclass(hint, PretrainedConfig)
    return hint if is_config and hint is not PretrainedConfig else None


def _named_alike(architecture: str) -> type | None:
    """A config class with the model's name: `StepVLForConditionalGeneration`, `StepVLConfig`."""
    wanted = _bare(_KIND.sub("", architecture))
    return _config_classes().get(wanted)


@functools.cache
def _config_classes() -> dict[str, type]:
    from sglang.srt.utils.hf_transformers.common import _CONFIG_REGISTRY
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    classes = [*CONFIG_MAPPING.values(), *_CONFIG_REGISTRY.values()]
    return {_bare(one.__name__.removesuffix("Config")): one for one in classes}


def _bare(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())
