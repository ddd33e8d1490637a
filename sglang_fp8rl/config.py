"""The options of `fp8_blockwise_online`: frozen, validated, unknown keys refused."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from .errors import ConfigError

QUANTIZATION_METHOD = "fp8_blockwise_online"
MISALIGNED_CHOICES = ("per_channel", "bf16", "error")
UNKNOWN_NAME_CHOICES = ("error", "warn")

# What SGLang itself adds to, or Hugging Face configs carry in, `quantization_config`.
_HOST_KEYS = frozenset(
    {"quant_method", "packed_modules_mapping", "hf_config", "requantization_method"}
)


@dataclass(frozen=True)
class Options:
    """What a user may set in the model's `quantization_config`.

    Attributes:
        weight_block_size: `(block_n, block_k)`; (128, 128) is the only size served.
        ignored_layers: modules that stay in high precision: full prefixes (a prefix covers what
            is below it), or `re:` and a regular expression that has to match the whole prefix.
        misaligned: what becomes of a module that can't be cut into blocks.
        unknown_names: whether an update that names no parameter fails or warns.
    """

    weight_block_size: tuple[int, int] = (128, 128)
    ignored_layers: tuple[str, ...] = ()
    misaligned: str = "per_channel"
    unknown_names: str = "error"

    def __post_init__(self) -> None:
        if tuple(self.weight_block_size) != (128, 128):
            raise ConfigError(
                "weight_block_size",
                f"{list(self.weight_block_size)}",
                "only [128, 128] is served: it is the block of SGLang's W8A8 kernels",
                "Leave the option out or set it to [128, 128].",
            )
        _one_of("misaligned", self.misaligned, MISALIGNED_CHOICES)
        _one_of("unknown_names", self.unknown_names, UNKNOWN_NAME_CHOICES)
        for pattern in self.ignored_layers:
            _check_pattern(pattern)

    @classmethod
    def from_dict(cls, config: Mapping[str, Any]) -> Options:
        """Read `quantization_config`, and `SGLANG_FP8_IGNORED_LAYERS` as SGLang's `fp8` does.

        Raises:
            ConfigError: an unknown key (the known ones are listed) or a value out of range.
        """
        known = [field.name for field in fields(cls)]
        given = {key: value for key, value in config.items() if key not in _HOST_KEYS}
        unknown = [key for key in given if key not in known]
        if unknown:
            near = difflib.get_close_matches(unknown[0], known, n=1)
            raise ConfigError(
                "quantization_config",
                f"unknown key {', '.join(map(repr, unknown))}",
                f"known keys are {', '.join(known)}",
                f"Did you mean {near[0]!r}?" if near else "Remove it.",
            )
        if "weight_block_size" in given:
            given["weight_block_size"] = _as_tuple("weight_block_size", given["weight_block_size"])
        ignored = _as_tuple("ignored_layers", given.get("ignored_layers") or ())
        from_env = os.environ.get("SGLANG_FP8_IGNORED_LAYERS", "")
        given["ignored_layers"] = ignored + tuple(
            layer.strip() for layer in from_env.split(",") if layer.strip()
        )
        return cls(**given)


@dataclass(frozen=True)
class IgnoredLayers:
    """Decides whether a module prefix is covered by the `ignored_layers` patterns."""

    patterns: tuple[str, ...]
    packed_modules_mapping: Mapping[str, Sequence[str]]

    def match(self, prefix: str) -> tuple[str, ...]:
        """The patterns that cover this module; empty if it is to be quantized.

        A fused module is covered when the patterns cover it or all of its parts.

        Raises:
            ConfigError: the patterns cover some parts of a fused module and not others.
        """
        direct = self._match_one(prefix)
        parent, _, leaf = prefix.rpartition(".")
        parts = self.packed_modules_mapping.get(leaf)
        if direct or not parts:
            return (direct,) if direct else ()
        found = [self._match_one(f"{parent}.{part}" if parent else part) for part in parts]
        if all(found):
            return tuple(dict.fromkeys(found))
        if any(found):
            covered = [part for part, hit in zip(parts, found, strict=True) if hit]
            raise ConfigError(
                prefix,
                f"ignored_layers covers {covered} of its parts {list(parts)}",
                "a fused module has one scheme",
                f"Ignore all of {list(parts)} or none.",
            )
        return ()

    def _match_one(self, prefix: str) -> str:
        bare = prefix.removeprefix("model.")
        for pattern in self.patterns:
            if pattern.startswith("re:"):
                if re.fullmatch(pattern[3:], prefix):
                    return pattern
            else:
                stem = pattern.removeprefix("model.")
                if bare == stem or bare.startswith(stem + "."):
                    return pattern
        return ""


def _check_pattern(pattern: object) -> None:
    if not isinstance(pattern, str) or not pattern:
        raise ConfigError(
            "ignored_layers", repr(pattern), "entries are non-empty strings", "Remove it."
        )
    if pattern.startswith("re:"):
        try:
            re.compile(pattern[3:])
        except re.error as error:
            raise ConfigError(
                "ignored_layers",
                repr(pattern),
                f"not a regular expression: {error}",
                "Correct it, or write a full module prefix.",
            ) from error


def _one_of(name: str, value: object, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ConfigError(
            name, repr(value), f"one of {', '.join(choices)}", f"The default is {choices[0]}."
        )


def _as_tuple(name: str, value: object) -> tuple:
    if not isinstance(value, (list, tuple)):
        raise ConfigError(name, repr(value), "has to be a list", f"Write it as [{value!r}].")
    return tuple(value)
