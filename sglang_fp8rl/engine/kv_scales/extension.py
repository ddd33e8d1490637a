"""The exponents of an FP8 KV cache: which are in force, and when they may move.

Served weights are folded at all times but two: while `load_weights` writes, and while somebody reads
them to compare or to keep (`unfolded`). So codes in the cache always belong to the exponents in force,
and these move only at the moment in which the cache is empty: right after SGLang flushed it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch

from ...errors import ConfigError
from ..extension import Extension, Received
from ..host.arguments import asked_for
from ..host.boundary import Boundary
from ..host.request_end import fail_behind
from ..host.update_request import are_weights_released
from .attention_layers import Fold, attention_layers, refused
from .calibration import largest_of_text, tokens_for
from .choice import ROOM, Sides, chosen, exponents_of, table_of
from .sent_scales import SentScales

# Server argument to why scales can't follow there; refused where it is set.
REFUSED = {
    "speculative_algorithm": "a draft model writes into a cache of its own, without scales",
    "enable_hierarchical_cache": "a cache on the host or in a store outlives a change of scales",
    "enable_lmcache": "a cache on the host or in a store outlives a change of scales",
    "enable_lora": "an adapter on q, k, v or o is added beside the weights that carry the scales",
    "lora_paths": "an adapter on q, k, v or o is added beside the weights that carry the scales",
    "quantization_param_path": "SGLang reads scales from that file and applies them beside those in the weights",
    "disaggregation_mode": "bytes of the cache go to another server, which has scales of its own",
}


class KvScaling(Extension):
    """Of one served model; takes part in updates where the server scales its cache.

    Attributes:
        fold: the exponents in force.
        sides: what they were chosen from; empty before.
        tokens: that are run to calibrate; empty in other modes.
        group: the ranks that choose together.
        is_stale: whether an update came since the choice; the same on every rank.
        is_frozen: whether a flush was refused that a choice waited for.
        moves: updates that moved an exponent of any layer.
    """

    section = "kv_scales"
    gauges = {  # noqa: RUF012
        "kv_certified": "1 if no value of the FP8 KV cache can saturate, else 0.",
        "kv_scale_moves": "Updates that moved a scale of the FP8 KV cache.",
    }

    def __init__(self, refit: Any) -> None:
        super().__init__(refit)
        self.mode: str = refit.options.kv_scales
        self.fold = Fold()
        self.sides: Sides = []
        # While the checkpoint is loaded, the cache's dtype is not known yet.
        self.sent = SentScales(self._attention_of) if self.mode == "sent" else None
        self.tokens: list[int] = []
        self.is_stale = self.is_frozen = False
        self.moves = 0
        self._ignored: set[str] = set()
        self._refit: Any = None

    def start(self, runner: Any) -> bool:
        """Choose and fold for the first time. A collective.

        Raises:
            ConfigError: the cache is in FP8, and its scales can't follow the weights.
        """
        if runner.kv_cache_dtype is not torch.float8_e4m3fn or self.mode == "unit":
            return False
        from sglang.srt.arg_groups.overrides import resolved_view
        from sglang.srt.distributed.parallel_state import get_attn_tp_group
        from sglang.srt.layers.dp_attention import is_dp_attention_enabled
        from sglang.srt.runtime_context import get_server_args

        check_arguments(resolved_view(get_server_args()))
        if self.mode == "calibrated" and is_dp_attention_enabled():
            rule = "ranks with requests of their own can't run one text together"
            raise refused("--enable-dp-attention", "kv_scales 'calibrated'", rule)
        layers = attention_layers(runner.model)
        if not layers:
            return False
        if self.mode == "calibrated":
            self.tokens = tokens_for(runner, self.refit.options)
        self.fold, self.group = Fold(layers), get_attn_tp_group().cpu_group
        self._choose()
        self.moves = 0
        return True

    def _attention_of(self, sent_prefix: str) -> str | None:
        """The served attention module whose weights are sent below that prefix; None if none are."""
        known = self.refit.learned_names().known
        weights = (known.get(f"{sent_prefix}.{leaf}.weight") for leaf in ("k_proj", "qkv_proj"))
        places = [one.landings[0].target.name for one in weights if one and one.landings]
        return places[0].rsplit(".", 2)[0] if places else None

    def unfolded(self) -> AbstractContextManager[None]:
        return self.fold.unfolded()

    def begin(self, call: Any) -> None:
        """A scale comes once in a refit, in any of its calls."""
        if self.sent is not None and call.update.refit is not self._refit:
            self._refit = call.update.refit
            self.sent.begin_refit()

    def weights_lost(self) -> None:
        self.is_stale = bool(self.sides)

    def receive(self, sent: Mapping[str, torch.Tensor], *, is_serving: bool) -> Received:
        if self.sent is not None:
            return self.sent.receive(sent, is_serving=is_serving)
        if not is_serving:
            return Received()
        self._ignored.update(sent)
        return Received(ignored=list(sent))

    def end_request(self, *, was_flushed: bool) -> None:
        self.is_stale = True
        if Boundary(self.group).on_every_rank(was_flushed):
            self._choose()

    def cache_is_empty(self, manager: Any) -> bool:
        if not self.is_stale or are_weights_released(manager):
            return True  # released: scales are chosen at the next flush, from the weights that come
        boundary = Boundary(self.group)
        boundary.step(self._choose)
        return not fail_behind(boundary, manager, self.refit)

    def end_session(self, manager: Any) -> None:
        """Where nothing was flushed: flush if an exponent has to move. Where requests are running the
        flush is refused; then the exponents stay, and with them what is in the cache is right."""
        has_to_move = False
        try:
            if self.is_stale:
                wanted = self._chosen()
                has_to_move = not torch.equal(exponents_of(wanted), self.fold.exponents)
                if not has_to_move:
                    self._adopt(wanted)
        finally:
            # All flush if one has to: with DP attention, ranks choose apart.
            if not Boundary(manager.tp_cpu_group).on_every_rank(not has_to_move):
                # `cache_is_empty` comes before this returns
                self.is_frozen = not manager.flush_cache() and has_to_move

    def _choose(self) -> None:
        self._adopt(self._chosen())

    def _chosen(self) -> Sides:
        """A collective."""
        return chosen(self.group, self._table, ROOM[self.mode])

    def _table(self) -> torch.Tensor:
        layers, renew = self.fold.layers, self.refit.derived.end_of_update
        if not self.tokens:
            with self.fold.unfolded():
                return table_of(layers, None if self.sent is None else self.sent.largest(layers))
        try:  # kernels read packed scales: of the weights that the text runs on, then of those in force
            with self.fold.unfolded():
                renew()
                return table_of(layers, largest_of_text(self.refit.model, self.tokens, layers))
        finally:
            renew()

    def _adopt(self, sides: Sides) -> None:
        self.sides, self.is_stale, self.is_frozen = sides, False, False
        exponents = exponents_of(sides)
        if self.sent is not None:
            self.sent.note_choice()
        if not torch.equal(exponents, self.fold.exponents):
            self.moves += 1
            self.fold.change(exponents)
            self.refit.derived.end_of_update()

    @staticmethod
    def planned(refit: Any) -> dict[str, Any]:
        """What `--kv-cache-dtype fp8_e4m3` would be here; the exponents are in the status."""
        found = {"mode": refit.options.kv_scales, "layers": 0, "refused": ""}
        if found["mode"] != "unit":
            try:
                found["layers"] = len(attention_layers(refit.model))
            except ConfigError as error:
                found["refused"] = str(error)
        return {"kv_scales": found}

    def status(self) -> dict[str, Any] | None:
        if not self.sides:
            return None
        reason = f"kv_scales is {self.mode!r}: this server chooses scales itself"
        ignored = {"ignored": len(self._ignored), "reason": reason} if self._ignored else None
        digest = hashlib.blake2b(",".join(map(str, self.tokens)).encode(), digest_size=8)
        calibration = {"tokens": len(self.tokens), "digest": digest.hexdigest()}
        by_layer = zip(self.fold.layers, self.sides[::2], self.sides[1::2], strict=True)
        return {
            "mode": self.mode,
            "certified": not self.is_stale and all(side["certified"] for side in self.sides),
            "follows_weights": not self.is_stale,
            "frozen": self.is_frozen,
            "moves": self.moves,
            "calibration": calibration if self.tokens else None,
            "sent": ignored if self.sent is None else self.sent.as_dict(self.fold.layers),
            "layers": [{"module": one.name, "keys": k, "values": v} for one, k, v in by_layer],
        }

    @staticmethod
    def measured(status: Mapping[str, Any]) -> Mapping[str, float]:
        section = status["kv_scales"]
        if section is None:
            return {}
        return {"kv_certified": int(section["certified"]), "kv_scale_moves": section["moves"]}


def check_arguments(args: Any) -> None:
    """Raises `ConfigError` for a server whose cache the scales can't follow."""
    for found in asked_for(args, REFUSED):
        raise refused(*found)
