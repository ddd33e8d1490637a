"""A call that is refused leaves nothing behind but its name in the status."""

from __future__ import annotations

import pytest
import torch
from support.by_definition import quantize_blockwise
from support.engine.commands import send, status, update_from_disk
from support.engine.models import MODELS
from support.engine.pool import on

from sglang_fp8rl.lab.testing.checkpoints import save_checkpoint

pytestmark = [pytest.mark.engine, on("qwen3-tp1")]

MODEL = MODELS["qwen3"]
DOWN = "model.layers.0.mlp.down_proj.weight"
UP = "model.layers.1.mlp.up_proj.weight"
NORM = "model.norm.weight"


def problems(host):
    state = host.call(status)
    assert state["state"] == "failed"
    return " | ".join(state["problems"] + state["last_refit"]["errors"])


def test_what_cannot_be_read_is_in_the_status_until_a_full_update(host):
    assert not host.call(send, ["not a payload"])[0]
    problems(host)
    host.send([(NORM, MODEL.first[NORM])])
    problems(host)  # nobody knows what it was, so a norm alone does not mend it


def test_halves_of_a_refused_call_never_meet_the_next_one(host):
    """The first call fails behind the codes of `UP`; the second brings its scale."""
    codes, scale = quantize_blockwise(MODEL.second[UP])
    host.refuses([(UP, codes), (DOWN, torch.ones(3, 3))], DOWN, UP, flush_cache=False)
    host.refuses_and_keeps([(f"{UP}_scale_inv", scale)], "a scale without its FP8 weight")


def test_one_error_hides_no_other(host):
    """A NaN before the tensor that stops the call, and all names behind it."""
    spoiled = MODEL.second[DOWN].clone()
    spoiled[0, 0] = float("nan")
    behind = [(name, weight) for name, weight in MODEL.second.items() if name not in (DOWN, UP)]
    items = [(DOWN, spoiled), (UP, torch.ones(3, 3)), *behind]
    host.refuses(items, "NaN or Inf", "shape (3, 3)", "not reached")
    host.send([(DOWN, MODEL.second[DOWN]), (UP, MODEL.second[UP])])
    assert "not reached" in problems(host)


def test_a_disk_update_teaches_no_names(host, checkpoint_dir):
    wrong = DOWN.replace("down_proj", "donw_proj")
    state = {**MODEL.second, wrong: MODEL.second[DOWN].clone()}
    path = save_checkpoint(checkpoint_dir / "misspelt", MODEL.config, state)
    success, message = host.call(update_from_disk, str(path))
    assert not success
    assert wrong in message
    host.refuses([(wrong, MODEL.second[DOWN])], wrong)


def test_a_disk_update_that_fails_changes_no_later_output(host, checkpoint_dir):
    before = host.say()
    state = {**MODEL.first, NORM: torch.ones(3)}
    path = save_checkpoint(checkpoint_dir / "wrong-norm", MODEL.config, state)
    assert not host.call(update_from_disk, str(path))[0]
    host.update_to("first")
    assert host.say() == before
