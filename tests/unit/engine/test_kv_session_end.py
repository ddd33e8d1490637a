"""The end of a session with an FP8 KV cache whose ranks choose apart (DP attention): they flush together, or not at all."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import pytest
import torch
from support.threads_as_ranks import Ranks

pytest.importorskip("sglang")

from sglang_fp8rl.engine.host.boundary import Boundary
from sglang_fp8rl.engine.kv_scales.extension import KvScaling


class Rank(KvScaling):
    """One that has to move by `exponent`; None for one whose choice is not stale."""

    def __init__(self, group, exponent):
        self.exponent, self.flushes, self.adopted = exponent, 0, []
        self.is_stale, self.is_frozen = exponent is not None, False
        self.fold = SimpleNamespace(exponents=torch.zeros(1, 2, dtype=torch.int64))
        self.manager = SimpleNamespace(tp_cpu_group=group, flush_cache=self.flush_cache)

    def _chosen(self):
        if self.exponent == "raises":
            raise ValueError("no number")
        return [{"exponent": self.exponent}] * 2

    def _adopt(self, sides):
        self.adopted.append(sides)

    def flush_cache(self):
        """As SGLang's with `after_flush`: a collective of all ranks, refused where one is busy."""
        self.flushes += 1
        return Boundary(self.manager.tp_cpu_group).on_every_rank(self.exponent != "busy")


@pytest.mark.parametrize("exponents", itertools.product([None, 0, 3], repeat=2))
def test_all_flush_if_one_has_to_move(monkeypatch, exponents):
    ranks = Ranks(2, monkeypatch)
    ours = [Rank(*one) for one in zip(ranks.groups, exponents, strict=True)]
    ranks.call(lambda at: ours[at].end_session(ours[at].manager))
    assert [one.flushes for one in ours] == [int(3 in exponents)] * 2
    assert [len(one.adopted) for one in ours] == [int(one == 0) for one in exponents]
    assert not any(one.is_frozen for one in ours)


def test_a_rank_that_can_t_choose_leaves_no_other_one_waiting(monkeypatch):
    ranks = Ranks(2, monkeypatch)
    ours = [Rank(*one) for one in zip(ranks.groups, ("raises", 3), strict=True)]

    def end(at):
        try:
            ours[at].end_session(ours[at].manager)
        except ValueError as error:
            return str(error)

    assert ranks.call(end) == ["no number", None]
    assert [one.flushes for one in ours] == [1, 1]
