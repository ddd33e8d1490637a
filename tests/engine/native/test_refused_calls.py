"""A call that is refused leaves nothing behind but its name in the status."""

from __future__ import annotations

import pytest
import torch
from support.by_definition import quantize_blockwise
from support.engine.commands import begin, digests, end, send, status, update, update_from_disk
from support.engine.models import MODELS
from support.engine.pool import on

from sglang_fp8rl.lab.testing.checkpoints import save_checkpoint

pytestmark = [pytest.mark.engine, on("qwen3-tp1")]

MODEL = MODELS["qwen3"]
DOWN = "model.layers.0.mlp.down_proj.weight"
UP = "model.layers.1.mlp.up_proj.weight"
NORM = "model.norm.weight"


@pytest.fixture(autouse=True)
def _a_full_update_clears_everything(host):
    before = host.call(digests)
    yield
    assert host.call(update, list(MODEL.first.items()))[0]
    assert host.call(digests) == before
    state = host.call(status)
    assert state["consistent"], state["problems"]
    assert state["last_refit"]["outcome"] == "ok"


def refused(host, tensors, **options):
    success, message = host.call(update, tensors, *options.values())
    assert not success
    return message


def problems(host):
    state = host.call(status)
    assert state["state"] == "failed"
    assert not state["consistent"]
    return " | ".join(state["problems"] + state["last_refit"]["errors"])


def pair(name, which="second"):
    codes, scale = quantize_blockwise(getattr(MODEL, which)[name])
    return (name, codes), (f"{name}_scale_inv", scale)


def test_what_cannot_be_read_is_in_the_status_until_a_full_update(host):
    assert not host.call(send, ["not a payload"])[0]
    problems(host)
    assert host.call(update, [(NORM, MODEL.first[NORM])])[0]
    problems(host)  # nobody knows what it was, so a norm alone does not mend it


def test_halves_of_a_refused_call_never_meet_the_next_one(host):
    """The first call fails behind the codes of `UP`; the second brings its scale."""
    (_, codes), scale = pair(UP)
    wrong = (DOWN, torch.ones(3, 3))
    text = refused(host, [(UP, codes), wrong], load_format=None, flush_cache=False)
    assert DOWN in text
    assert UP in text
    before = host.call(digests)
    assert "a scale without its FP8 weight" in refused(host, [scale])
    assert host.call(digests) == before


def test_one_error_hides_no_other(host):
    """A NaN before the tensor that stops the call, and all names behind it."""
    spoiled = MODEL.second[DOWN].clone()
    spoiled[0, 0] = float("nan")
    behind = [(name, weight) for name, weight in MODEL.second.items() if name not in (DOWN, UP)]
    text = refused(host, [(DOWN, spoiled), (UP, torch.ones(3, 3)), *behind])
    assert "NaN or Inf" in text
    assert "shape (3, 3)" in text
    assert "not reached" in text
    mended = [(DOWN, MODEL.second[DOWN]), (UP, MODEL.second[UP])]
    assert host.call(update, mended)[0]
    assert "not reached" in problems(host)


def test_a_session_that_ends_with_half_of_a_pair_is_in_the_status(host):
    success, message = host.call(begin) if has_sessions(host) else (False, "")
    if not success:
        pytest.skip(f"this SGLang has no sessions {message}")
    assert host.call(update, [pair(UP)[0]])[0]
    assert not host.call(end)[0]
    assert "FP8 without its scale" in problems(host)


def has_sessions(host):
    return host.call(_has_sessions)


def _has_sessions(scheduler):
    return hasattr(scheduler.weight_updater, "begin_weight_update")


def test_a_disk_update_teaches_no_names(host, checkpoint_dir):
    wrong = DOWN.replace("down_proj", "donw_proj")
    state = {**MODEL.second, wrong: MODEL.second[DOWN].clone()}
    path = save_checkpoint(checkpoint_dir / "misspelt", MODEL.config, state)
    success, message = host.call(update_from_disk, str(path))
    assert not success
    assert wrong in message
    assert wrong in refused(host, [(wrong, MODEL.second[DOWN])])


def test_a_disk_update_that_fails_changes_no_later_output(host, checkpoint_dir):
    before = host.say()
    state = {**MODEL.first, NORM: torch.ones(3)}
    path = save_checkpoint(checkpoint_dir / "wrong-norm", MODEL.config, state)
    assert not host.call(update_from_disk, str(path))[0]
    assert host.call(update, list(MODEL.first.items()))[0]
    assert host.say() == before
