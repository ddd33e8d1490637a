"""The options of `fp8_blockwise_online`: frozen, validated, unknown keys refused."""

from __future__ import annotations

import difflib
import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeInt,
    ValidationError,
)

from .errors import ConfigError

QUANTIZATION_METHOD = "fp8_blockwise_online"

MAX_CALIBRATION_TOKENS = 512

# A decoder layer's number in the name of a module or a tensor.
LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")

# What SGLang itself adds to, or Hugging Face configs carry in, `quantization_config`.
_HOST_KEYS = frozenset(
    {"quant_method", "packed_modules_mapping", "hf_config", "requantization_method"}
)
_LISTS_OF_PATTERNS = ("ignored_layers", "modules_to_not_convert", "bf16_activations")


def _compilable(pattern: str) -> str:
    """A full prefix, which covers what is below it, or `re:` and an expression for the whole prefix."""
    if pattern.startswith("re:"):
        try:
            re.compile(pattern[3:])
        except re.error as error:
            raise ValueError(f"{pattern!r} is not a regular expression: {error}") from error
    return pattern


_Patterns = tuple[Annotated[str, Field(min_length=1), AfterValidator(_compilable)], ...]


class Options(BaseModel):
    """What a user may set in the model's `quantization_config`; docs/reference.md says what each is for."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")

    weight_block_size: tuple[Literal[128], Literal[128]] = Field(
        (128, 128),
        description="only [128, 128] is served: it is the block of SGLang's W8A8 kernels",
    )
    granularity: Literal["blockwise", "per_channel"] = "blockwise"  # where the shape allows both
    ignored_layers: _Patterns = ()
    modules_to_not_convert: _Patterns = ()  # the same, as Hugging Face writes it
    misaligned: Literal["per_channel", "bf16", "error"] = "per_channel"
    activations: Literal["fp8", "bf16"] = "fp8"  # nothing that is stored depends on it
    bf16_activations: _Patterns = ()  # modules that keep theirs while the others' are quantized
    exact_product_tokens: NonNegativeInt = 16  # of a batch; a larger one has doubled rows
    num_first_layers_in_bf16: NonNegativeInt = 0
    num_last_layers_in_bf16: NonNegativeInt = 0
    use_weight_pow2_scale: bool = False
    use_activation_pow2_scale: bool = False  # where SGLang's kernels do so
    round_to_bf16: bool = True
    unknown_names: Literal["error", "warn"] = "error"
    replay: bool = True
    kv_scales: Literal["certified", "calibrated", "sent", "unit"] = "certified"
    # Ids of one sequence.
    kv_calibration_tokens: tuple[NonNegativeInt, ...] = Field((), max_length=MAX_CALIBRATION_TOKENS)

    def layer_reason(self, prefix: str, num_layers: int | None) -> str:
        """Why a module of that prefix stays in high precision by its layer's number, or empty. Raises `ConfigError`
        where the last layers are asked for and the model's depth is not known."""
        first, last = self.num_first_layers_in_bf16, self.num_last_layers_in_bf16
        found = LAYER.search(prefix)
        if found is None:
            return ""
        layer = int(found.group(1))
        if layer < first:
            return f"num_first_layers_in_bf16: {first}"
        if not last:
            return ""
        if num_layers is None:
            rule = "the model's config has no num_hidden_layers to count back from"
            remedy = "Write the layers into ignored_layers."
            raise ConfigError("num_last_layers_in_bf16", str(last), rule, remedy)
        is_last = num_layers - last <= layer < num_layers
        return f"num_last_layers_in_bf16: {last}" if is_last else ""

    @classmethod
    def from_dict(cls, config: Mapping[str, Any]) -> Options:
        """Read `quantization_config`, and `SGLANG_FP8_IGNORED_LAYERS` as SGLang's `fp8` does. Raises `ConfigError` for
        an unknown key (the known ones are listed) or a value out of range."""
        given = {key: value for key, value in config.items() if key not in _HOST_KEYS}
        _check_keys(given, list(cls.model_fields))
        for name in _LISTS_OF_PATTERNS:
            if given.get(name, ()) is None:  # Hugging Face writes null
                del given[name]
        from_env = map(str.strip, os.environ.get("SGLANG_FP8_IGNORED_LAYERS", "").split(","))
        ignored = given.get("ignored_layers", [])
        if isinstance(ignored, (list, tuple)):
            given["ignored_layers"] = [*ignored, *filter(None, from_env)]
        try:
            options = cls.model_validate_json(json.dumps(given, default=repr))
        except ValidationError as error:
            first = error.errors()[0]
            if not first["loc"]:  # half of a character, somewhere in a text
                found = "quantization_config", ascii(given), "its texts are Unicode", "Correct it."
                raise ConfigError(*found) from error
            name = str(first["loc"][0])
            field = cls.model_fields[name]
            raise ConfigError(
                name,
                repr(given[name])[:80],
                field.description or first["msg"].removeprefix("Value error, "),
                f"Correct it, or leave it out: the default is {json.dumps(field.default)}.",
            ) from error
        for name in ("bf16_activations", "use_activation_pow2_scale"):
            if options.activations == "bf16" and getattr(options, name):
                raise ConfigError(
                    name,
                    f"{getattr(options, name)!r} with activations='bf16'",
                    "it is about activations that are quantized, and none are",
                    "Leave one of the two options out.",
                )
        if options.kv_calibration_tokens and options.kv_scales != "calibrated":
            raise ConfigError(
                "kv_calibration_tokens",
                f"{len(options.kv_calibration_tokens)} tokens with kv_scales={options.kv_scales!r}",
                "they are what kv_scales='calibrated' runs, and nothing else reads them",
                "Leave one of the two options out, or set kv_scales to 'calibrated'.",
            )
        return options


def _check_keys(given: Mapping[str, Any], known: list[str]) -> None:
    unknown = [key for key in given if key not in known]
    if unknown:
        near = difflib.get_close_matches(unknown[0], known, n=1)
        found = f"unknown key {', '.join(map(repr, unknown))}"
        rule = f"known keys are {', '.join(known)}"
        remedy = f"Did you mean {near[0]!r}?" if near else "Remove it."
        raise ConfigError("quantization_config", found, rule, remedy)


@dataclass(frozen=True)
class ModulePatterns:
    """Decides whether a module prefix is covered by the patterns of an option."""

    option: str
    patterns: tuple[str, ...]
    parts_of: Callable[[str], Sequence[str]]  # of a fused module, by the end of its prefix
    used: set[str] = field(default_factory=set)  # patterns that covered one so far

    def match(self, prefix: str) -> tuple[str, ...]:
        """The patterns that cover this module; empty if none does. A fused one is covered when they cover it or all of
        its parts; raises `ConfigError` where they cover some parts and not others."""
        parent, dot, leaf = prefix.rpartition(".")
        parts = self.parts_of(leaf)
        direct = self._covering(prefix)
        found = {part: self._covering(f"{parent}{dot}{part}") for part in parts}
        self.used.update(direct, *found.values())  # what others cover already names a module too
        if direct:
            return direct
        covered = [part for part, patterns in found.items() if patterns]
        if len(covered) not in (0, len(found)):
            raise ConfigError(
                prefix,
                f"{self.option} covers {covered} of its parts {list(parts)}",
                "a fused module has one scheme",
                f"Name all of {list(parts)} or none.",
            )
        return tuple(dict.fromkeys(chain(*found.values())))

    def _covering(self, prefix: str) -> tuple[str, ...]:
        """The patterns that cover this prefix; in front of either, `model.` does not count."""
        bare = prefix.removeprefix("model.")

        def covers(pattern: str) -> bool:
            stem = pattern.removeprefix("model.")
            if pattern.startswith("re:"):
                return re.fullmatch(pattern[3:], prefix) is not None
            return bare == stem or bare.startswith(f"{stem}.")

        return tuple(filter(covers, self.patterns))
