"""The options of `fp8_blockwise_online`: frozen, validated, unknown keys refused."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from .errors import ConfigError

QUANTIZATION_METHOD = "fp8_blockwise_online"
GRANULARITY_CHOICES = ("blockwise", "per_channel")
ACTIVATION_CHOICES = ("fp8", "bf16")
MISALIGNED_CHOICES = ("per_channel", "bf16", "error")
UNKNOWN_NAME_CHOICES = ("error", "warn")
KV_SCALE_CHOICES = ("certified", "calibrated", "sent", "unit")

# A decoder layer's number in the name of a module or a tensor.
LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")

# What SGLang itself adds to, or Hugging Face configs carry in, `quantization_config`.
_HOST_KEYS = frozenset(
    {"quant_method", "packed_modules_mapping", "hf_config", "requantization_method"}
)

# Options that mean nothing where no activations are quantized.
_QUANTIZED_ACTIVATIONS = ("bf16_activations", "use_activation_pow2_scale")


@dataclass(frozen=True)
class Options:
    """What a user may set in the model's `quantization_config`.

    Attributes:
        weight_block_size: `(block_n, block_k)`; (128, 128) is the only size served.
        granularity: what shares one scale where the shape allows both: `blockwise`, or
            `per_channel` for every module, to compare the two.
        ignored_layers: modules that stay in high precision: full prefixes (a prefix covers what
            is below it), or `re:` and a regular expression that has to match the whole prefix.
        modules_to_not_convert: another name of `ignored_layers`, as Hugging Face writes it.
        misaligned: what becomes of a module that can't be cut into blocks.
        activations: what FP8 weights are multiplied with: activations quantized to FP8, or as they
            are. Nothing that is stored depends on it.
        bf16_activations: modules whose activations stay as they are while the others' are
            quantized; patterns as of `ignored_layers`.
        num_first_layers_in_bf16, num_last_layers_in_bf16: decoder layers that stay in high
            precision at either end.
        use_weight_pow2_scale: weight scales are rounded up to powers of two.
        use_activation_pow2_scale: activation scales too, where SGLang's kernels do so.
        round_to_bf16: cast FP32 through BF16, as the trainer's forward pass sees its weights;
            false casts FP32 to FP8 directly, for research.
        unknown_names: whether an update that names no parameter fails or warns.
        replay: record what a bucket's loaders write, and repeat it for the next such bucket.
        kv_scales: how an FP8 KV cache is kept in range; nothing where the cache is not e4m3.
        kv_calibration_tokens: what `calibrated` runs instead of its own text: ids of one sequence.
    """

    weight_block_size: tuple[int, int] = (128, 128)
    granularity: str = "blockwise"
    ignored_layers: tuple[str, ...] = ()
    modules_to_not_convert: tuple[str, ...] = ()
    misaligned: str = "per_channel"
    activations: str = "fp8"
    bf16_activations: tuple[str, ...] = ()
    num_first_layers_in_bf16: int = 0
    num_last_layers_in_bf16: int = 0
    use_weight_pow2_scale: bool = False
    use_activation_pow2_scale: bool = False
    round_to_bf16: bool = True
    unknown_names: str = "error"
    replay: bool = True
    kv_scales: str = "certified"
    kv_calibration_tokens: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if tuple(self.weight_block_size) != (128, 128):
            raise ConfigError(
                "weight_block_size",
                f"{list(self.weight_block_size)}",
                "only [128, 128] is served: it is the block of SGLang's W8A8 kernels",
                "Leave the option out or set it to [128, 128].",
            )
        _one_of("granularity", self.granularity, GRANULARITY_CHOICES)
        _one_of("misaligned", self.misaligned, MISALIGNED_CHOICES)
        _one_of("activations", self.activations, ACTIVATION_CHOICES)
        _one_of("unknown_names", self.unknown_names, UNKNOWN_NAME_CHOICES)
        _one_of("kv_scales", self.kv_scales, KV_SCALE_CHOICES)
        _token_ids("kv_calibration_tokens", self.kv_calibration_tokens)
        for name in ("num_first_layers_in_bf16", "num_last_layers_in_bf16"):
            _a_count(name, getattr(self, name))
        for name in (
            "use_weight_pow2_scale",
            "use_activation_pow2_scale",
            "round_to_bf16",
            "replay",
        ):
            _one_of(name, getattr(self, name), (True, False))
        for pattern in self.patterns:
            _check_pattern("ignored_layers", pattern)
        for pattern in self.bf16_activations:
            _check_pattern("bf16_activations", pattern)
        idle = [name for name in _QUANTIZED_ACTIVATIONS if getattr(self, name)]
        if self.activations == "bf16" and idle:
            raise ConfigError(
                idle[0],
                f"{getattr(self, idle[0])!r} with activations='bf16'",
                "it is about activations that are quantized, and none are",
                "Leave one of the two options out.",
            )

    @property
    def patterns(self) -> tuple[str, ...]:
        """Everything that names modules to leave alone."""
        return self.ignored_layers + self.modules_to_not_convert

    def layer_reason(self, prefix: str, num_layers: int | None) -> str:
        """Why a module of that prefix stays in high precision by its layer's number, or empty.

        Raises:
            ConfigError: the last layers are asked for and the model's depth is not known.
        """
        found = LAYER.search(prefix)
        if found is None or not (self.num_first_layers_in_bf16 or self.num_last_layers_in_bf16):
            return ""
        layer = int(found.group(1))
        if layer < self.num_first_layers_in_bf16:
            return f"num_first_layers_in_bf16: {self.num_first_layers_in_bf16}"
        if not self.num_last_layers_in_bf16:
            return ""
        if num_layers is None:
            raise ConfigError(
                "num_last_layers_in_bf16",
                str(self.num_last_layers_in_bf16),
                "the model's config has no num_hidden_layers to count back from",
                "Write the layers into ignored_layers.",
            )
        if num_layers - self.num_last_layers_in_bf16 <= layer < num_layers:
            return f"num_last_layers_in_bf16: {self.num_last_layers_in_bf16}"
        return ""

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
        tokens = given.get("kv_calibration_tokens") or ()
        given["kv_calibration_tokens"] = _as_tuple("kv_calibration_tokens", tokens)
        converted = given.get("modules_to_not_convert") or ()
        given["modules_to_not_convert"] = _as_tuple("modules_to_not_convert", converted)
        kept = given.get("bf16_activations") or ()
        given["bf16_activations"] = _as_tuple("bf16_activations", kept)
        ignored = _as_tuple("ignored_layers", given.get("ignored_layers") or ())
        from_env = os.environ.get("SGLANG_FP8_IGNORED_LAYERS", "")
        given["ignored_layers"] = ignored + tuple(
            layer.strip() for layer in from_env.split(",") if layer.strip()
        )
        return cls(**given)


@dataclass(frozen=True)
class ModulePatterns:
    """Decides whether a module prefix is covered by the patterns of an option.

    Attributes:
        used: patterns that covered one so far.
    """

    option: str
    patterns: tuple[str, ...]
    packed_modules_mapping: Mapping[str, Sequence[str]]
    used: set[str] = field(default_factory=set)

    def match(self, prefix: str) -> tuple[str, ...]:
        """The patterns that cover this module; empty if none does.

        A fused module is covered when the patterns cover it or all of its parts.

        Raises:
            ConfigError: the patterns cover some parts of a fused module and not others.
        """
        direct = self._match_one(prefix)
        parent, _, leaf = prefix.rpartition(".")
        parts = [] if direct else list(self.packed_modules_mapping.get(leaf, ()))
        above = f"{parent}." if parent else ""
        found = [self._match_one(above + part) for part in parts] or [direct]
        if all(found):
            self.used.update(found)
            return tuple(dict.fromkeys(found))
        if any(found):
            covered = [part for part, hit in zip(parts, found, strict=True) if hit]
            verb = "Ignore" if self.option == "ignored_layers" else "Name"
            raise ConfigError(
                prefix,
                f"{self.option} covers {covered} of its parts {parts}",
                "a fused module has one scheme",
                f"{verb} all of {parts} or none.",
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


def _check_pattern(option: str, pattern: object) -> None:
    if not isinstance(pattern, str) or not pattern:
        raise ConfigError(option, repr(pattern), "entries are non-empty strings", "Remove it.")
    if pattern.startswith("re:"):
        try:
            re.compile(pattern[3:])
        except re.error as error:
            raise ConfigError(
                option,
                repr(pattern),
                f"not a regular expression: {error}",
                "Correct it, or write a full module prefix.",
            ) from error


def _a_count(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ConfigError(name, repr(value), "a number of layers, 0 or more", "The default is 0.")


def _token_ids(name: str, value: tuple) -> None:
    if any(isinstance(one, bool) or not isinstance(one, int) or one < 0 for one in value):
        raise ConfigError(
            name,
            repr(value)[:80],
            "ids of tokens, 0 or more",
            "Give what the server's tokenizer makes of a text; the default is a text of its own.",
        )


def _one_of(name: str, value: object, choices: tuple) -> None:
    if value not in choices or type(value) is not type(choices[0]):
        raise ConfigError(
            name,
            repr(value),
            f"one of {', '.join(map(str, choices))}",
            "Choose one of them.",
        )


def _as_tuple(name: str, value: object) -> tuple:
    if not isinstance(value, (list, tuple)):
        raise ConfigError(name, repr(value), "has to be a list", f"Write it as [{value!r}].")
    return tuple(value)
