"""Where the seconds of a refit go: marks of when each stage began, added up when somebody asks."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise
from time import perf_counter

Mark = tuple[str, float]  # a stage, and when it began: by `time.perf_counter`

# Of a server's refit. What is unpickled or received before `load_weights` is "opening handles".
OPENING_HANDLES = "opening_handles"
LOADING = "load_weights"
WAITING_FOR_READS = "waiting_for_reads"
FLUSHING = "flushing"
ANSWERING = "answering"  # all else between a request and its answer
BETWEEN_REQUESTS = "between_requests"


class Marks(list[Mark]):
    """When each stage of one request, or of a client's refit, began."""

    def begin(self, stage: str) -> None:
        """Count the time as that stage's from now on."""
        self.append((stage, perf_counter()))


def seconds_by_stage(marks: Iterable[Mark]) -> dict[str, float]:
    """Seconds of each stage; the last mark is the end of the one before it. Together they are all that passed."""
    seconds: dict[str, float] = {}
    for (stage, began), (_, ended) in pairwise(marks):
        seconds[stage] = seconds.get(stage, 0.0) + ended - began
    return seconds
