"""Which layers of a model its small one keeps: the first of each kind."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, NamedTuple

LEAST, MOST = 2, 6  # layers of a small model
LARGEST_KIND = 256  # a larger number is no name of a kind, it is a size

# How many layers a part of a model has; the first that a config has says it.
_COUNTS = re.compile(
    r"num_hidden_layers|n_layers?|num_layers?|depth|(en|de)coder_layers|num_blocks|layers|\w+_num_hidden_layers"
)
# Numbers of layers of one kind.
_INDEXES = re.compile(
    r"(\w+_)?(layers|layer_ids|layer_idx|layers_indices|layers_enum|attn_idxs|block_indexes|visual_indexes)"
    r"|dense_mlp_idx"
)
_FIRST = re.compile(r"first_k_dense_replace|num_dense_layers|moe_layer_start_index")
_LAST = re.compile(r"num_kv_shared_layers")
_EVERY = re.compile(
    r"full_attention_interval|_?sliding_window_pattern|decoder_sparse_step|moe_layer_(freq|interval)"
    r"|interleave_moe_layer_step|no_rope_layer_interval|global_attn_every_n_layers"
    r"|(attn|expert)_layer_period|layer_group_size|index_topk_freq|cross_attention_interval"
)


class Layers(NamedTuple):
    """`kept`: layers of `total`, by number."""

    total: int
    kept: tuple[int, ...]

    @classmethod
    def of(cls, config: dict[str, Any]) -> Layers | None:
        """Of a part of a model; None for a part that does not say how many it has."""
        total = _count(config)
        if total is None:
            return None
        told = dict(_told(config, total))
        kept = _first_of_each(
            [tuple(one[layer] for one in told.values()) for layer in range(total)]
        )
        return cls(total, kept)

    def is_count(self, key: str, value: Any) -> bool:
        """Whether it is the number of layers."""
        return value == self.total and type(value) is int and bool(_COUNTS.fullmatch(key))

    def describes(self, key: str, value: Any) -> bool:
        return _of_layers(key, value, self.total) is not None

    def small(self, key: str, value: Any) -> Any:
        """The same said of the layers that are kept."""
        told = _of_layers(key, value, self.total)
        assert told is not None
        mine = [told[layer] for layer in self.kept]
        if type(value) is int:
            if not _EVERY.fullmatch(key):
                return sum(mine)
            return 2 if any(mine) else value
        indexes = _indexes_of(key, value)
        if indexes is not None:
            first = int(max(indexes, default=0) == self.total)
            places = [place + first for place, is_one in enumerate(mine) if is_one]
            return ",".join(map(str, places)) if isinstance(value, str) else places
        if isinstance(value, dict):
            by_layer = {int(layer): one for layer, one in value.items()}
            places = enumerate(self.kept)
            return {str(place): by_layer[at] for place, at in places if at in by_layer}
        return "".join(mine) if isinstance(value, str) else mine


def lost(real: dict[str, Any], small: dict[str, Any], prefix: str = "") -> list[str]:
    """Kinds of layers, and parts, that a model has and its small one has not."""
    counts = _count(real), _count(small)
    found = []
    if None not in counts:
        told, mine = (dict(_told(*one)) for one in zip((real, small), counts, strict=True))  # type: ignore[arg-type]
        for key in told:
            if all(type(one) is int and one > LARGEST_KIND for one in told[key]):
                continue  # sizes
            left = _distinct(told[key]) - _distinct(mine.get(key, ()))
            found += [f"{prefix}{key}: {one}" for one in sorted(left)]
    for key, part in real.items():
        if isinstance(part, dict) and part and key.endswith("_config"):
            other = small.get(key)
            found += lost(part, other, f"{prefix}{key}.") if other else [f"{prefix}{key}"]
    return found


def _distinct(told: Any) -> set[str]:
    return {str(one) for one in told}


def _count(config: dict[str, Any]) -> int | None:
    found = [
        (key != "num_hidden_layers", value)
        for key, value in config.items()
        if type(key) is str and type(value) is int and value > 0 and _COUNTS.fullmatch(key)
    ]
    found += [
        (True, len(one))
        for key, one in config.items()
        if key in ("layers_block_type", "layer_types") and one
    ]
    return min(found, key=lambda one: one[0])[1] if found else None


def _told(config: dict[str, Any], total: int, prefix: str = "") -> Iterator[tuple[str, list[Any]]]:
    """What keys say of each layer; also in parts that have no layers of their own."""
    for key, value in config.items():
        if type(key) is not str:
            continue
        told = _of_layers(key, value, total)
        if told is not None:
            yield prefix + key, told
        elif isinstance(value, dict) and _count(value) is None:
            yield from _told(value, total, f"{prefix}{key}.")


def _of_layers(key: str, value: Any, total: int) -> list[Any] | None:
    """What a key says of each layer; None if nothing."""
    if type(value) is int:
        return _of_number(key, value, total)
    indexes = _indexes_of(key, value)
    if indexes is not None:
        first = int(max(indexes, default=0) == total)  # some count from one
        return [layer + first in indexes for layer in range(total)] if indexes else None
    if isinstance(value, dict):
        is_by_layer = "layer" in key and all(str(layer).isdigit() for layer in value)
        by_layer = {int(at): str(sorted(one)) for at, one in value.items()} if is_by_layer else {}
        return [by_layer.get(layer) for layer in range(total)] if by_layer else None
    is_listed = isinstance(value, list) or (isinstance(value, str) and "pattern" in key)
    is_plain = is_listed and not any(isinstance(one, (list, dict)) for one in value)
    return list(value) if is_plain and len(value) == total > 1 else None


def _of_number(key: str, value: int, total: int) -> list[Any] | None:
    if value <= 0:
        return None
    if _FIRST.fullmatch(key):
        return [layer < value for layer in range(total)]
    if _LAST.fullmatch(key):
        return [layer >= total - value for layer in range(total)]
    if _EVERY.fullmatch(key) and value > 1:
        return [(layer + 1) % value == 0 for layer in range(total)]
    return None


def _indexes_of(key: str, value: Any) -> set[int] | None:
    """Numbers of layers, in ascending order."""
    if not _INDEXES.fullmatch(key):
        return None
    if isinstance(value, str) and re.fullmatch(r"\d+(,\d+)*", value):
        value = [int(one) for one in value.split(",")]
    is_one = isinstance(value, list) and all(type(one) is int for one in value)
    return set(value) if is_one and value == sorted(set(value)) else None


def _first_of_each(kinds: list[tuple[Any, ...]]) -> tuple[int, ...]:
    """Layers with all kinds; where there are too many, with everything that is said of any layer."""
    kept = sorted({kind: layer for layer, kind in reversed(list(enumerate(kinds)))}.values())
    if len(kept) > MOST:
        kept, seen = [], set()
        for layer, kind in enumerate(kinds):
            said = set(enumerate(kind))
            if not said <= seen:
                kept, seen = [*kept, layer], seen | said
    for layer in range(len(kinds)):
        if len(kept) >= min(LEAST, len(kinds)):
            break
        if layer not in kept:
            kept = sorted([*kept, layer])
    return tuple(kept)
