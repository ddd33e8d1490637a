"""Record once, replay for ever: the plans of the bucket layouts that were seen before.

A recording (`recording.py`) is made while the native loaders run. It becomes a plan
(`bucket_plan.py`) if the call succeeded; the next bucket of the same layout is written from the plan,
without a loader, a name lookup or any Python per tensor. What can't be told from the bucket's layout
alone stays with the native path, by name.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from dataclasses import dataclass, field
from typing import Any

from .bucket_plan import BucketPlan
from .buckets import Bucket, FlatBucket

# Tensors of all plans together: a table row of 136 bytes each, its name and its layout. Four times
# what Qwen3-235B sends as FP8 pairs.
MAX_TENSORS = 262_144


@dataclass
class ReplayCounts:
    """What was replayed and what was not, since the start."""

    calls: int = 0
    tensors: int = 0
    native_calls: int = 0
    native_tensors: int = 0
    native_reasons: Counter[str] = field(default_factory=Counter)


class PlanStore:
    """Plans by layout: few of them, the one longest unused goes first."""

    def __init__(self) -> None:
        self._plans: OrderedDict[tuple, list[BucketPlan]] = OrderedDict()
        self.counts = ReplayCounts()

    def find(self, bucket: Bucket) -> BucketPlan | None:
        plans = self._plans.get(bucket.key)
        if plans is None:
            return None
        self._plans.move_to_end(bucket.key)
        plan = next((plan for plan in plans if plan.fits(bucket)), None)
        if plan is not None and isinstance(bucket, FlatBucket):
            bucket.take_metadata(plan.metadata)
        return plan

    def add(self, bucket: Bucket, plan: BucketPlan) -> None:
        """Keep a plan; one of the same layout that no longer fits is replaced."""
        others = [old for old in self._plans.get(bucket.key, ()) if old.layout != plan.layout]
        self._plans[bucket.key] = [*others, plan]
        self._plans.move_to_end(bucket.key)
        while len(self) > 1 and self.size > MAX_TENSORS:
            self._plans.popitem(last=False)

    def __len__(self) -> int:
        return sum(map(len, self._plans.values()))

    @property
    def size(self) -> int:
        return sum(plan.size for plans in self._plans.values() for plan in plans)

    def as_dict(self) -> dict[str, Any]:
        """For the status section."""
        counts = self.counts
        return {
            "plans": len(self),
            "calls": counts.calls,
            "tensors": counts.tensors,
            "native_calls": counts.native_calls,
            "native_tensors": counts.native_tensors,
            "native_reasons": dict(counts.native_reasons),
        }
