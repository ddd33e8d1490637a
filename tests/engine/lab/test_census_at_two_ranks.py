"""The census at two ranks, on SGLang's own start: what breaks on one rank is told, and only that."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("sglang")

from support.engine.forked import run_forked

from tools.census.layout import Layout
from tools.census.outcome import Row

QWEN = "Qwen3ForCausalLM"  # its part of a rank has whole blocks and broken ones
GLM_FLASH = "Glm4MoeLiteForCausalLM"


def _row_into(path, architecture, layout, broken_on):
    """In a process of its own."""
    from tools.census import judge, worker
    from tools.census.configs import warm_up
    from tools.census.preload import import_sglang

    class Breaks(judge.Judge):
        """On one rank, a bit of what an update wrote is turned before it is compared."""

        def _compare(self, before):
            import torch

            if torch.distributed.get_rank() == broken_on:
                name = "model.layers.0.mlp.down_proj.weight_scale_inv"
                parameter = dict(self._loaded.model.named_parameters())[name]
                parameter.data.view(torch.uint8).view(-1)[0] ^= 1
            super()._compare(before)

    import_sglang()
    warm_up()
    judge.Judge = Breaks if broken_on is not None else judge.Judge
    row = worker.row_of(architecture, 200, layout=Layout.of_name(layout))
    path.write_text(json.dumps(row.__dict__))


def _row(tmp_path, architecture, layout, broken_on=None):
    path = tmp_path / "answer.json"
    ended = run_forked(_row_into, (path, architecture, layout, broken_on), tmp_path / "log")
    assert path.exists(), f"{ended}: {(tmp_path / 'log').read_text()[-2000:]}"
    return Row(**json.loads(path.read_text()))


def test_a_class_at_tp_2_holds_the_bytes_of_a_fresh_load_and_says_the_same(tmp_path):
    row = _row(tmp_path, QWEN, "tp2")
    assert (row.kind, row.silent, row.reasons) == ("replayed", [], [])
    assert row.is_proven
    assert row.is_parted
    assert row.schemes == {"blockwise": 12, "per_channel": 4}


def test_glm_4_7_flash_at_ep_2_holds_the_bytes_of_a_fresh_load_and_says_the_same(tmp_path):
    row = _row(tmp_path, GLM_FLASH, "ep2")
    assert (row.kind, row.silent, row.reasons) == ("replayed", [], [])
    assert row.is_proven
    assert "derived weights" in row.relies_on  # 0.5.16 keeps copies too


def test_a_bit_that_turns_on_the_second_rank_is_told_of_that_rank(tmp_path):
    row = _row(tmp_path, QWEN, "tp2", broken_on=1)
    assert "model.layers.0.mlp.down_proj.weight_scale_inv (rank 1)" in row.silent
    of_the_other = [place for place in row.silent if place.endswith("(rank 0)")]
    assert set(of_the_other) <= {"outputs (rank 0)"}  # both compute them
    assert not row.is_proven
