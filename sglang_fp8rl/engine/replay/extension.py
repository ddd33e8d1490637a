"""Replay as a part of an update that can be left out: SGLang's loaders can write every bucket too."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, ClassVar

from ..arrival.bucket import Bucket
from ..extension import Extension, Way
from ..native.call import Call
from .recipes import RecipeStore, learn, replay
from .recording import Recording


class Replay(Extension):
    """The recipes of one served model."""

    section = "replay"
    gauges: ClassVar = {"replayed_share": "Share of all update calls so far that were replayed."}

    def __init__(self, refit: Any) -> None:
        super().__init__(refit)
        self.recipes = RecipeStore()

    def way_of(self, bucket: Bucket) -> Way | None:
        recipe = self.recipes.find(bucket) if self.refit.options.replay else None
        if recipe is None:
            return None
        return Way(recipe.brings, partial(replay, bucket, recipe, self.recipes, self.refit.ledger))

    def recording_of(self, bucket: Bucket, sent: Any, sources: Any) -> Recording | None:
        return Recording(bucket, sent, sources) if self.refit.options.replay else None

    def stored(self, call: Call) -> None:
        if isinstance(call.recording, Recording):
            learn(self.recipes, call.recording, self.refit.ledger, call, self.refit.options)

    def status(self) -> dict[str, Any]:
        return self.recipes.as_dict()

    @staticmethod
    def measured(status: Mapping[str, Any]) -> Mapping[str, float]:
        counts = status["replay"]
        if counts is None:
            return {}
        calls = counts["calls"] + counts["native_calls"]
        return {"replayed_share": counts["calls"] / calls} if calls else {}
