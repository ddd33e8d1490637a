"""Scales of the FP8 KV cache beside the serving of weights: when they start and follow, and what the status says of them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from ...errors import ConfigError
from ...numerics.reference import FP8_MAX
from ..extension import Extension, Received
from ..host.boundary import Boundary
from ..host.refit_end import fail_behind
from ..host.request_checks import are_weights_released
from .attention_layers import AttentionLayer, attention_layers, refused
from .calibration import Calibration, calibration_of
from .choice import Side
from .kv_scales import KvScales, Source
from .sent_scales import SentScales

# Server argument to why scales can't follow there; refused where it is set.
REFUSED = {
    "speculative_algorithm": "a draft model writes into a cache of its own, without scales",
    "enable_hierarchical_cache": "a cache on the host or in a store outlives a change of scales",
    "enable_lmcache": "a cache on the host or in a store outlives a change of scales",
    "enable_lora": "an adapter on q, k, v or o is added beside the weights that carry the scales",
    "lora_paths": "an adapter on q, k, v or o is added beside the weights that carry the scales",
}
REFUSED_CALIBRATED = {
    "enable_dp_attention": "ranks with requests of their own can't run one text together",
}


class KvScaling(Extension):
    """Of one served model.

    Attributes:
        kv: the exponents in force.
        sent: scales that the trainer sends, used or not.
        calibration: where the server measures them.
    """

    gauges = {  # noqa: RUF012
        "kv_certified": "1 if no value of the FP8 KV cache can saturate, else 0.",
        "kv_scale_moves": "Updates that moved a scale of the FP8 KV cache.",
        "kv_saturated_share": "Share of sampled codes in the FP8 KV cache that are as large as can be, at the "
        "end of the last refit.",
    }

    def __init__(self, refit: Any) -> None:
        super().__init__(refit)
        self._mode = refit.options.kv_scales
        self.kv = KvScales(self._mode, refit.derived.end_of_update)
        self.sent = SentScales(self._mode, self._attention_of)
        self.calibration: Calibration | None = None

    def start(self, runner: Any) -> None:
        """Raises `ConfigError` for an FP8 cache whose scales can't follow the weights."""
        if runner.kv_cache_dtype is not torch.float8_e4m3fn or self._mode == "unit":
            return
        from sglang.srt.distributed.parallel_state import get_attn_tp_group
        from sglang.srt.runtime_context import get_server_args

        check_arguments(get_server_args(), self._mode)
        if runner.dtype is not torch.bfloat16:
            raise refused(
                "--dtype", str(runner.dtype), "powers of two commute with BF16's rounding"
            )
        layers = attention_layers(runner.model)
        source: Source | None = None
        if self._mode == "sent":
            source = self.sent
        elif self._mode == "calibrated":
            source = self.calibration = calibration_of(runner, self.refit.options)
        self.sent.is_active = True
        self.kv.start(layers, get_attn_tp_group().cpu_group, source)

    def _attention_of(self, sent_prefix: str) -> str | None:
        """The served attention module whose weights are sent below that prefix; None if none are."""
        known_names = self.refit.learned_names().known
        for leaf in ("k_proj", "qkv_proj"):
            known = known_names.get(f"{sent_prefix}.{leaf}.weight")
            if known is not None and known.landings:
                name: str = known.landings[0].target.name
                return name.rsplit(".", 2)[0]
        return None

    def unfolded(self) -> AbstractContextManager[None]:
        return self.kv.unfolded()

    def receive(self, sent: Mapping[str, torch.Tensor], *, is_serving: bool) -> Received:
        return self.sent.receive(sent, is_serving=is_serving)

    def note_update(self) -> None:
        self.kv.note_update()

    def end_request(self) -> None:
        self.kv.end_of_request()

    def end_session(self, manager: Any) -> None:
        self.kv.settle(manager.flush_cache)

    def cache_is_empty(self, manager: Any) -> bool:
        """Scales may move now, and at no other moment."""
        kv, is_updating = self.kv, self.refit.is_updating
        if not kv.is_active or are_weights_released(manager):
            return True  # released: scales are chosen at the next flush, from the weights that come
        if is_updating or kv.is_settling:  # the request has its boundary
            kv.cache_is_empty(during_update=is_updating)
            return True
        boundary = Boundary(kv.group)
        boundary.step(kv.cache_is_empty)
        return not fail_behind(boundary, self.refit, None)

    def plan(self) -> dict[str, Any]:
        """What `--kv-cache-dtype fp8_e4m3` would be here; the exponents are in the status."""
        refused_for, layers = "", 0
        if self._mode != "unit":
            try:
                layers = len(attention_layers(self.refit.model))
            except ConfigError as error:
                refused_for = str(error)
        return {"kv_scales": {"mode": self._mode, "layers": layers, "refused": refused_for}}

    def status(self, manager: Any) -> dict[str, Any]:
        if not self.kv.is_active:
            return {"kv_scales": None}
        section = kv_section(self.kv, self.sent, self.calibration)
        return {"kv_scales": {**section, "stored": self._stored(manager)}}

    def _stored(self, manager: Any) -> list[dict[str, Any]] | None:
        """What lies in the FP8 cache; None while its memory is released, when nothing of it may be read."""
        from sglang.srt.constants import GPU_MEMORY_TYPE_KV_CACHE

        if manager is None or GPU_MEMORY_TYPE_KV_CACHE in manager.offload_tags:
            return None
        return stored_codes(manager.tp_worker.model_runner.token_to_kv_pool, self.kv.layers)

    @staticmethod
    def measured(status: Mapping[str, Any]) -> Mapping[str, float]:
        section = status["kv_scales"]
        if section is None:
            return {}
        share = saturated_share(section["stored"])
        found = {"kv_certified": int(section["certified"]), "kv_scale_moves": section["moves"]}
        return found if share is None else {**found, "kv_saturated_share": share}


def check_arguments(args: Any, mode: str) -> None:
    """Raises `ConfigError` for a server whose cache the scales can't follow in that mode."""
    both = {**REFUSED, **REFUSED_CALIBRATED} if mode == "calibrated" else REFUSED
    for name, reason in both.items():
        value = getattr(args, name, None)
        if value:
            raise refused(f"--{name.replace('_', '-')}", str(value), reason)
    if args.disaggregation_mode != "null":
        reason = "bytes of the cache go to another server, which has scales of its own"
        raise refused("--disaggregation-mode", args.disaggregation_mode, reason)


SAMPLED_SLOTS = 512  # SGLang hands out the lowest free slots
_MAGNITUDE, _LARGEST, _SMALLEST_NORMAL = 0x7F, 0x7E, 0x08


def kv_section(kv: KvScales, sent: SentScales, calibration: Calibration | None) -> dict[str, Any]:
    """Of a server that scales its cache.

    Args:
        sent: scales that the trainer sends, used or not.
        calibration: where the server measures them.
    """
    return {
        "mode": kv.mode,
        "certified": not kv.is_stale
        and all(side.is_certified for one in kv.chosen for side in (one.keys, one.values)),
        "follows_weights": not kv.is_stale,
        "frozen": kv.is_frozen,
        "moves": kv.moves,
        "calibration": calibration.as_dict() if calibration is not None else None,
        "sent": sent.as_dict(kv.layers),
        "layers": [
            {"module": layer.name, "keys": _side(one.keys), "values": _side(one.values)}
            for layer, one in zip(kv.layers, kv.chosen, strict=True)
        ],
    }


def _side(side: Side) -> dict[str, Any]:
    """`head_room`: binades from the largest value (the bound, where none was given) to 448."""
    bound = _known(side.bound)
    largest = _known(side.largest)
    fits = bound if side.largest is None else largest
    room = None if fits is None else side.exponent + math.log2(FP8_MAX / fits)
    return {
        "exponent": side.exponent,
        "bound": bound,
        "largest": largest,
        "head_room": None if room is None else round(room, 3),
        "certified": side.is_certified,
    }


def _known(value: float | None) -> float | None:
    return value if value is not None and 0 < value < math.inf else None


def stored_codes(pool: Any, layers: Sequence[AttentionLayer]) -> list[dict[str, Any]]:
    """Per layer, of keys and of values: `sampled` codes that are not zero, and of these the `saturated`
    share (448 or NaN), the `subnormal` share, and `unused` binades between the largest and 448.

    Reads a few slots of SGLang's pool: small kernels and one transfer, at a request for the status.
    """
    buffers = [
        buffer(layer.layer_id)[:SAMPLED_SLOTS]
        for layer in layers
        for buffer in (pool.get_key_buffer, pool.get_value_buffer)
    ]
    counts = torch.stack([_counts(codes) for codes in buffers]).tolist()
    described = [_described(*one) for one in counts]
    return [
        {"module": layer.name, "keys": keys, "values": values}
        for layer, keys, values in zip(layers, described[::2], described[1::2], strict=True)
    ]


def saturated_share(stored: Sequence[dict[str, Any]] | None) -> float | None:
    """Of all sampled codes; None where there are none.

    Args:
        stored: as `stored_codes` gives it.
    """
    sides = [layer[side] for layer in stored or () for side in ("keys", "values")]
    sampled = sum(side["sampled"] for side in sides)
    if not sampled:
        return None
    return sum(side["sampled"] * (side["saturated"] or 0.0) for side in sides) / sampled


def _counts(codes: torch.Tensor) -> torch.Tensor:
    magnitude = codes.view(torch.uint8) & _MAGNITUDE
    return torch.stack(
        [
            (magnitude > 0).sum(),
            (magnitude >= _LARGEST).sum(),
            ((magnitude > 0) & (magnitude < _SMALLEST_NORMAL)).sum(),
            magnitude.amax(),
        ]
    )


def _described(written: int, saturated: int, subnormal: int, largest: int) -> dict[str, Any]:
    if not written:
        return {"sampled": 0, "saturated": None, "subnormal": None, "unused": None}
    value = torch.tensor(largest, dtype=torch.uint8).view(torch.float8_e4m3fn).float().item()
    return {
        "sampled": written,
        "saturated": saturated / written,
        "subnormal": subnormal / written,
        "unused": round(math.log2(FP8_MAX / value), 2) if math.isfinite(value) else None,
    }
