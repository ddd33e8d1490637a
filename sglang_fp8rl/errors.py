"""Errors that name the module, the value, the rule that was broken, and the remedy."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Sequence


def as_text(text: str) -> str:
    """`text` as any encoder takes it: names that are sent may hold lone surrogates."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


MAX_LISTED = 8
_MAX_NAME = 200  # characters: a name may be anything


def listed(names: Sequence[str]) -> str:
    """The first of these names, for a message."""
    more = f" and {len(names) - MAX_LISTED} more" if len(names) > MAX_LISTED else ""
    return ", ".join(map(_shown, names[:MAX_LISTED])) + more


def _shown(name: str) -> str:
    """A name as it is if that can be read; else in quotes, with what can't be seen in it escaped."""
    short = name if len(name) <= _MAX_NAME else f"{name[:_MAX_NAME]}…"
    is_plain = name.isascii() and name.isprintable() and name.strip() == name != ""
    return short if is_plain else ascii(short)


def near_matches(name: str, known: Iterable[str]) -> str:
    """`Near matches: a, b. `, to begin a remedy with; empty if nothing is near."""
    near = difflib.get_close_matches(name, list(known))
    return f"Near matches: {', '.join(near)}. " if near else ""


# Between the dots of a name: what PEFT wraps around a model, and what its adapters call their weights.
_OF_AN_ADAPTER = re.compile(
    r"(^|\.)(base_model\.model|base_layer|original_module|modules_to_save|(lora|ia3|hada|lokr|b?oft|vera)_\w+)(\.|$)"
)


def is_of_an_adapter(name: str) -> bool:
    """Whether PEFT names it so: a part of an adapter, or a weight that one stands beside."""
    return _OF_AN_ADAPTER.search(name) is not None


def remedy_for_unknown(name: str, known: Iterable[str], otherwise: str) -> str:
    """What to do about a name that is not among these: near matches and `otherwise`; of an adapter, neither."""
    if is_of_an_adapter(name):
        return (
            "It is of an adapter (PEFT's names), and what is served in FP8 is its sum with the base weight: merge it "
            "before sending (merge_adapter, and names without base_model.model. and .base_layer), or have SGLang "
            "load the adapter beside the base weights (--enable-lora, POST /load_lora_adapter)."
        )
    return near_matches(name, known) + otherwise


class Fp8RlError(ValueError):
    """Base of every error this package raises on purpose: the `subject` (a tensor name, a module prefix, an option) has a
    `value` that breaks the `rule`; the `remedy` is what the reader can do."""

    def __init__(self, subject: str, value: str, rule: str, remedy: str) -> None:
        self.subject, self.value, self.rule, self.remedy = subject, value, rule, remedy
        super().__init__(as_text(f"{subject}: {value}; {rule}. {remedy}".rstrip()))

    def __reduce__(self) -> tuple[type[Fp8RlError], tuple[str, str, str, str]]:
        """Errors travel between processes: over Ray, and between the ranks of a trainer."""
        return type(self), (self.subject, self.value, self.rule, self.remedy)


class ConfigError(Fp8RlError):
    """An option that is unknown or has a value that can't be served."""


class QuantizationError(Fp8RlError):
    """A tensor that can't be cast: wrong rank, dtype, shape, or not finite."""


class RefitError(Fp8RlError):
    """A weight update that did not do what was asked of it."""


class NoAnswerError(RefitError):
    """A request that no answer came to: whether the server did what it was asked is not known."""


class HostError(Fp8RlError):
    """An SGLang (or driver, or GPU) that this version does not support."""


class EvaluationError(Fp8RlError):
    """A model that can't be evaluated: its server, its checkpoint, a file or an answer is in the way."""
