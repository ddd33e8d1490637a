"""Scales of the FP8 KV cache beside the serving of weights: when they start, follow and are told of."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch

from ...errors import ConfigError
from ..extension import Extension, Received
from ..host.boundary import Boundary
from ..host.refit_end import fail_behind
from ..host.request_checks import are_weights_released
from .attention_layers import attention_layers, refused
from .calibration import Calibration, calibration_of
from .kv_scales import KvScales, Source
from .sent_scales import SentScales
from .status import kv_section, saturated_share, stored_codes

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
