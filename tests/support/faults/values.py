"""Numbers and dtypes that can't be served."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from .fault import Group
from .trainer import DOWN, EMBEDDING, HEAD, NORM, QUERY, UP, Answer, Trainer

GROUP = Group("Numbers and dtypes")
row = GROUP.row
NAN, INF, TOO_LARGE = float("nan"), float("inf"), 3.4028e38
NAMED, ONE_BLOCK = ("NaN or Inf",), "NaN or Inf in 1 of 8"
Q_NORM = "model.layers.1.self_attn.q_norm.weight"


def broken(
    word: str, name: str, at: Any, value: float, dtype: Any = None, told: Sequence[str] = NAMED
) -> None:
    """A row for one wrong number in a tensor; what else is in one of the matrices is served."""
    serves = [] if name in (NORM, Q_NORM) else [name]
    row(*told, about=name, serves=serves, word=word)(
        lambda trainer: trainer.send(trainer.broken(name, at, value, dtype))
    )


broken("one_nan_in_an_fp8_weight", DOWN, (130, 500), NAN, told=(ONE_BLOCK, "keeps its old bytes"))


@row("NaN or Inf in 8 of 8", about=DOWN)
def nothing_but_nan_in_an_fp8_weight(trainer: Trainer) -> Answer:
    return trainer.send((DOWN, torch.full((256, 512), NAN)))


broken("an_infinity_in_a_bf16_source", DOWN, (0, 0), INF, torch.bfloat16, [ONE_BLOCK])
broken("a_negative_infinity_in_an_fp16_source", DOWN, (255, 511), -INF, torch.float16, [ONE_BLOCK])
broken(
    "a_number_that_rounds_to_infinity_in_an_fp8_weight", DOWN, (5, 5), TOO_LARGE, told=[ONE_BLOCK]
)
broken("a_nan_in_half_of_a_fused_weight", UP, (511, 0), NAN)


@row("NaN or Inf", about=QUERY, serves=[QUERY, DOWN, NORM])
def a_nan_in_a_flattened_bucket_of_good_tensors(trainer: Trainer) -> Answer:
    bucket = [trainer.fresh(DOWN), trainer.broken(QUERY, (0, 0), NAN), trainer.fresh(NORM)]
    return trainer.flat(bucket)


@row("NaN or Inf", about=QUERY, serves=[QUERY, DOWN, NORM])
def a_nan_in_a_bucket_that_was_recorded_before(trainer: Trainer) -> Answer:
    bucket = [trainer.fresh(DOWN), trainer.fresh(QUERY), trainer.fresh(NORM)]
    for _ in range(2):
        assert trainer.flat([(name, trainer.old[name]) for name, _ in bucket]).code == 200
    bucket[1] = trainer.broken(QUERY, (0, 0), NAN)
    return trainer.flat(bucket)


broken("a_nan_in_a_norm", NORM, 0, NAN)
broken("an_infinity_in_a_norm_of_the_attention", Q_NORM, 63, INF)
broken("a_nan_in_the_head", HEAD, (511, 255), NAN, torch.bfloat16)
broken("an_infinity_in_the_embedding", EMBEDDING, (7, 7), -INF, torch.float16)
broken("a_number_that_rounds_to_infinity_in_a_norm", NORM, 255, TOO_LARGE)


def of_dtype(word: str, name: str, dtype: torch.dtype) -> None:
    """A row for a dtype that is not cast."""
    row(about=name, word=word)(lambda trainer: trainer.send((name, trainer.new[name].to(dtype))))


for _dtype in (
    torch.float64, torch.int8, torch.uint8, torch.int64, torch.bool, torch.complex64,
    torch.float8_e5m2, torch.float8_e4m3fnuz,
):  # fmt: skip
    of_dtype(f"a_weight_in_{str(_dtype).removeprefix('torch.')}", DOWN, _dtype)
of_dtype("a_norm_in_int32", NORM, torch.int32)
of_dtype("a_norm_in_fp8", NORM, torch.float8_e4m3fn)


@row("elements in memory", about=DOWN)
def a_sparse_weight(trainer: Trainer) -> Answer:
    for _ in range(2):  # dense it was recorded before
        assert trainer.send((DOWN, trainer.old[DOWN])).code == 200
    return trainer.send((DOWN, trainer.new[DOWN].to_sparse()))
