"""Server arguments that are refused."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ...errors import ConfigError

_OUTLIVES = "what it keeps of prompts was computed with older weights, and no flush empties it"
# Under which an update would not be what it says, and why.
REFUSED = {
    "enable_dp_attention_local_control_broadcast": "the ranks answer an update and a fingerprint together, so all of them "
    "get the request at once",
    "enable_flexkv": _OUTLIVES,
    "radix_cache_backend": _OUTLIVES,
    "enable_unified_cache_external_linker": _OUTLIVES,
    "language_only": "another server embeds its images, and no update reaches the tower there",
    "offload_group_size": "weights are fetched for the next forward pass behind the last one, codes before an update and "
    "scales after it",
}


def asked_for(args: Any, rules: Mapping[str, str]) -> Iterator[tuple[str, str, str]]:
    """Those that are set, of the arguments that have `rules`: the option, its value, and its rule."""
    for argument, rule in rules.items():
        value = getattr(args, argument, None)
        if value and value not in ("null", -1):  # no disaggregation, groups of no layers
            yield f"--{argument.replace('_', '-')}", str(value), rule


def check_arguments(args: Any) -> None:
    """Raises `ConfigError` for a server argument that is refused whatever is served."""
    for option, value, rule in asked_for(args, REFUSED):
        remedy = "Leave it out, and what has SGLang set it (DWDP, elastic EP)."
        raise ConfigError(option, value, rule, remedy)
