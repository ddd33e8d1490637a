"""Where the seconds of a refit go: marks of when each stage began, added up when somebody asks."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise

Mark = tuple[str, float]  # a stage, and when it began: by `time.perf_counter`

# Of a server's refit. What is unpickled or received before `load_weights` is "opening handles".
OPENING_HANDLES = "opening_handles"
LOADING = "load_weights"
WAITING_FOR_READS = "waiting_for_reads"
FLUSHING = "flushing"
ANSWERING = "answering"  # all else between a request and its answer
BETWEEN_REQUESTS = "between_requests"


def seconds_by_stage(marks: Iterable[Mark]) -> dict[str, float]:
    """Seconds of each stage; the last mark is the end of the one before it. Together they are all that passed."""
    seconds: dict[str, float] = {}
    for (stage, began), (_, ended) in pairwise(marks):
        seconds[stage] = seconds.get(stage, 0.0) + ended - began
    return seconds
