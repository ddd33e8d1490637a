"""The census at two ranks: what one of them does is told of that one, and holds up nobody."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import pytest
import torch

pytest.importorskip("sglang")

from support.small_class import Builder, Plain

from tools.census import families, judge, results, two_ranks
from tools.census.judge import Judge, judged
from tools.census.layout import ONE_RANK, TWO_RANKS, Layout
from tools.census.names import Sent, called, of_loader
from tools.census.one_rank import Namer, read_names
from tools.census.outcome import NO_EXPERTS, Row
from tools.census.preload import Judged
from tools.census.ranks import merged, run_forked

TP2, EP2 = TWO_RANKS


def _judged(architecture, directory, rank, *, broken_on=None):
    """As a rank is judged; on one of them a byte is broken between an update and the comparison."""

    def compare(model, fresh, differences=judge.differences):
        if rank == broken_on:
            model.a.bias.data.view(torch.uint8)[0] ^= 1
        return differences(model, fresh)

    judge.differences = compare
    (directory / "row.json").write_text(json.dumps(judged(architecture, Builder()).__dict__))


def test_two_ranks_that_hold_the_bytes_of_a_fresh_load_are_one_replayed_class():
    row = run_forked("Plain", _judged, limit=600, ranks=2)
    assert (row.kind, row.silent, row.is_parted) == ("replayed", [], True)
    assert (row.reached, row.held) == (4, 4)


def test_a_byte_that_is_broken_on_one_rank_is_silent_there():
    def broken(architecture, directory, rank):
        _judged(architecture, directory, rank, broken_on=1)

    row = run_forked("Plain", broken, limit=600, ranks=2)
    assert "a.bias (rank 1)" in row.silent
    assert "a.bias (parted) (rank 1)" in row.silent
    assert not [place for place in row.silent if not place.endswith("(rank 1)")]


def _has_ended(pid):
    """Whether a process that was told to has ended, also where nobody has asked for its status yet."""
    for _ in range(200):
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].startswith("Z"):
                return True
        except (FileNotFoundError, ProcessLookupError):
            return True
        time.sleep(0.05)
    return False


def test_a_rank_that_hangs_holds_up_nobody_and_is_ended(tmp_path):
    def hangs(architecture, directory, rank):
        if rank:
            (tmp_path / "pid").write_text(str(os.getpid()))
            time.sleep(600)
        _judged(architecture, directory, rank)

    row = run_forked("Plain", hangs, limit=600, ranks=2, others=0.5)
    assert row.kind == "not built"
    assert row.reasons == ["no answer 0.5 s behind the other rank's (rank 1)"]
    assert row.seconds < 300
    assert _has_ended(int((tmp_path / "pid").read_text()))


def test_a_rank_that_dies_is_told():
    def dies(architecture, directory, rank):
        if rank:
            os.kill(os.getpid(), signal.SIGSEGV)
        _judged(architecture, directory, rank)

    row = run_forked("Plain", dies, limit=600, ranks=2)
    assert row.kind == "not built"
    assert "ended by signal 11" in row.reasons[0]
    assert row.reasons[0].endswith("(rank 1)")


def test_a_class_is_what_its_worse_rank_is():
    one = Row("A", "replayed", is_parted=True, is_proven=True, schemes={"blockwise": 2})
    other = Row("A", "native", reasons=["it computes"], schemes={"blockwise": 1, "per_channel": 1})
    row = merged([one, other])
    assert (row.kind, row.reasons) == ("native", ["it computes (rank 1)"])
    assert not row.is_parted
    assert not row.is_proven
    assert row.schemes == {"blockwise": 3, "per_channel": 1}
    assert merged([other, other]).reasons == ["it computes"]
    assert merged([one]) is one


def test_a_layout_is_told_to_every_rank_alike():
    assert ONE_RANK.arguments(7) == []
    assert TP2.arguments(7) == ["--tp-size=2", "--ep-size=1", "--nccl-port=7"]
    assert EP2.arguments(7)[1] == "--ep-size=2"
    assert [Layout.of_name(one.name) for one in (ONE_RANK, TP2, EP2)] == [ONE_RANK, TP2, EP2]


def test_ranks_get_the_names_and_sizes_of_one_rank(tmp_path, monkeypatch):
    monkeypatch.setattr("tools.census.one_rank.Builder", lambda *_: Builder())
    path = tmp_path / "names.json"
    rows = []
    with pytest.raises(Judged):
        Namer("Plain", rows.append, path).load(None, None)
    names = read_names(path)
    assert names["a.weight"].shape == (6, 4)
    known = Judge("Plain", names=names)
    assert known.loads(Builder())
    known.refits()
    assert (known.row.kind, known.row.names) == ("replayed", 2)
    path.unlink()
    with pytest.raises(Judged):
        Namer("Plain", rows.append, path, needs_experts=True).load(None, None)
    assert rows[-1].reasons == [NO_EXPERTS]
    assert not path.exists()


def test_what_sglang_itself_cannot_load_on_a_rank_is_its_reason():
    one = Judge("Plain", names={"b": Sent((1,), torch.float32)})
    assert not one.loads(Builder())
    assert (one.row.kind, one.row.reasons) == ("not built", ["SGLang's own load: KeyError: 'b'"])


def test_names_that_become_one_are_one_tensor_and_some_are_in_no_checkpoint():
    sent = Sent((3, 2), torch.float32)
    shapes = {f"model.layers.2.moe.experts.{at}.up_proj.weight": sent for at in range(4)}
    found = called("Step3p5ForCausalLM", shapes)
    assert found == {"model.layers.2.moe.up_proj.weight": Sent((4, 3, 2), torch.float32)}
    assert called("UnlimitedOCRForCausalLM", {"vision_model.position_ids": sent}) == {}
    assert list(of_loader(Plain(), "a")) == ["a.bias", "a.weight"]


@pytest.fixture
def written(tmp_path, monkeypatch):
    """Results of one rank and of two."""
    monkeypatch.setattr(results, "FOLDER", tmp_path)
    monkeypatch.setattr(families, "FAMILIES", {"F": ("A", "B", "C", "D", "E")})
    alike = Row("A", "replayed", is_parted=True, is_proven=True, schemes={"blockwise": 1})
    draft = Row("D", "draft")
    one = [alike, Row("B", "native", is_parted=True), Row("C", "replayed"), draft]
    results.write(one)
    worse = Row("C", "refused", reasons=["SGLang asserts (rank 1)"])
    bad = Row("B", "native", silent=["x (rank 1)"], schemes={"blockwise": 1, "per_channel": 1})
    results.write([alike, bad, worse, draft], TP2)
    results.write([alike, *(Row(one, "not built", reasons=[NO_EXPERTS]) for one in "BCD")], EP2)


def test_families_say_what_they_are_at_two_ranks(written):
    text = families.section()
    assert "| replayed, token | replayed, token |" in text
    assert "| **silent**: x (rank 1) | no experts |" in text
    assert "| refused: SGLang asserts (rank 1) | no experts |" in text
    assert "| in high precision | no experts |" in text
    assert "| F | E | not tried |" in text


def test_classes_that_are_another_at_two_ranks_are_listed_with_the_reason(written):
    text = two_ranks.section()
    assert "### TP 2: 4 classes: 1 replayed" in text
    assert "| native, bytes | silent | x (rank 1) | B |" in text
    assert "| replayed, bytes | refused | SGLang asserts (rank 1) | C |" in text
    assert "in 2 classes; where the cut breaks a block: in 1; both in 1." in text
    assert "### EP 2: 1 classes" in text
    assert "Each is what it is at one rank." in text
    assert results.changed([Row("A", "native")], TP2) == ["A: native, on file replayed"]
