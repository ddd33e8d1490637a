"""How a class is served while it is judged: ranks, and whether they part its experts."""

from __future__ import annotations

import os
from typing import NamedTuple


class Layout(NamedTuple):
    """`ranks`: of tensor parallelism (`--tp-size`). `experts`: ranks that share the experts (`--ep-size`)."""

    ranks: int = 1
    experts: int = 1

    @property
    def name(self) -> str:
        """As the contract's layouts are called."""
        return f"ep{self.experts}" if self.experts > 1 else f"tp{self.ranks}"

    @property
    def title(self) -> str:
        return f"{self.name[:2].upper()} {self.name[2:]}"

    @classmethod
    def of_name(cls, name: str) -> Layout:
        size = int(name[2:])
        return cls(size, size if name.startswith("ep") else 1)

    def arguments(self, port: int) -> list[str]:
        """Of SGLang's server, the same on every rank; `port`: where ranks meet."""
        if self.ranks == 1:
            return []
        sizes = [f"--tp-size={self.ranks}", f"--ep-size={self.experts}"]
        return [*sizes, f"--nccl-port={port}"]

    @property
    def cores(self) -> str:
        """For SGLang, which wants to hear of a core for each rank."""
        cores = sorted(os.sched_getaffinity(0))
        return "|".join(str(cores[rank % len(cores)]) for rank in range(self.ranks))


ONE_RANK = Layout()
TWO_RANKS = (Layout(2), Layout(2, 2))  # those that the page shows beside one rank
