"""FP8 that was quantized by the trainer, and only half of it is right."""

from __future__ import annotations

from collections.abc import Callable

import torch

from .fault import Group
from .trainer import DOWN, NORM, UP, Answer, Trainer

GROUP = Group("FP8 pairs")
row = GROUP.row
SCALE = "not a positive finite number"


def with_scale(word: str, told: str, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """A row for codes with another scale than theirs."""

    def act(trainer: Trainer) -> Answer:
        codes, (name, scale) = trainer.pair(DOWN)
        return trainer.send(codes, (name, change(scale.clone())))

    row(told, about=f"{DOWN}_scale_inv", word=word)(act)


def set_to(value: float) -> Callable[[torch.Tensor], torch.Tensor]:
    def change(scale: torch.Tensor) -> torch.Tensor:
        scale[1, 3] = value
        return scale

    return change


@row("FP8 without its scale", "Send them together", about=DOWN)
def codes_without_their_scale(trainer: Trainer) -> Answer:
    return trainer.send(trainer.pair(DOWN)[0])


@row("a scale without its FP8 weight", about=f"{DOWN}_scale_inv")
def a_scale_without_its_codes(trainer: Trainer) -> Answer:
    return trainer.send(trainer.pair(DOWN)[1])


@row("code that is NaN", about=DOWN)
def a_nan_among_the_codes(trainer: Trainer) -> Answer:
    (name, codes), scale = trainer.pair(DOWN)
    codes.view(torch.uint8)[3, 3] = 0x7F
    return trainer.send((name, codes), scale)


with_scale("a_scale_of_nan", SCALE, set_to(float("nan")))
with_scale("a_scale_of_infinity", SCALE, set_to(float("inf")))
with_scale("a_scale_of_zero", SCALE, set_to(0.0))
with_scale("a_scale_below_zero", SCALE, set_to(-1.0))
with_scale("a_scale_of_another_shape", "the scale of", lambda scale: scale.t().contiguous())
with_scale("a_scale_in_bf16", "the scale of", lambda scale: scale.bfloat16())


@row("has no scale", about=f"{NORM}_scale_inv")
def a_scale_for_a_norm(trainer: Trainer) -> Answer:
    return trainer.send((f"{NORM}_scale_inv", torch.ones(2)))


@row("a scale without its FP8 weight", about=f"{UP}_scale_inv")
def the_other_half_of_a_call_that_was_refused(trainer: Trainer) -> Answer:
    """The codes came before a tensor that is wrong; they must not wait for the next call's scale."""
    codes, scale = trainer.pair(UP)
    assert trainer.send(codes, (DOWN, torch.ones(3, 3)), flush=False).code == 400
    return trainer.send(scale)


@row("FP8 without its scale", "Send them together", about=DOWN)
def codes_whose_scale_may_come_from_anybody(trainer: Trainer) -> Answer:
    """Without a session or a name; the call says that more is to come, not from whom."""
    return trainer.send(trainer.pair(DOWN)[0], flush=False)
