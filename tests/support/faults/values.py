"""Numbers and dtypes that can't be served."""

from __future__ import annotations

import torch

from .fault import Group
from .trainer import DOWN, EMBEDDING, HEAD, NORM, QUERY, UP, Answer, Trainer

GROUP = Group("Numbers and dtypes")
row = GROUP.row
NAN, INF = float("nan"), float("inf")
Q_NORM = "model.layers.1.self_attn.q_norm.weight"


@row("NaN or Inf in 1 of 8", "keeps its old bytes", about=DOWN, serves=[DOWN])
def one_nan_in_an_fp8_weight(trainer: Trainer) -> Answer:
    return trainer.send(trainer.broken(DOWN, (130, 500), NAN))


@row("NaN or Inf in 8 of 8", about=DOWN)
def nothing_but_nan_in_an_fp8_weight(trainer: Trainer) -> Answer:
    return trainer.send((DOWN, torch.full((256, 512), NAN)))


@row("NaN or Inf in 1 of 8", about=DOWN, serves=[DOWN])
def an_infinity_in_a_bf16_source(trainer: Trainer) -> Answer:
    return trainer.send(trainer.broken(DOWN, (0, 0), INF, torch.bfloat16))


@row("NaN or Inf in 1 of 8", about=DOWN, serves=[DOWN])
def a_negative_infinity_in_an_fp16_source(trainer: Trainer) -> Answer:
    return trainer.send(trainer.broken(DOWN, (255, 511), -INF, torch.float16))


@row("NaN or Inf in 1 of 8", about=DOWN, serves=[DOWN])
def a_number_that_rounds_to_infinity_in_an_fp8_weight(trainer: Trainer) -> Answer:
    return trainer.send(trainer.broken(DOWN, (5, 5), 3.4028e38))


@row("NaN or Inf", about=UP, serves=[UP])
def a_nan_in_half_of_a_fused_weight(trainer: Trainer) -> Answer:
    return trainer.send(trainer.broken(UP, (511, 0), NAN))


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


@row("NaN or Inf", about=NORM)
def a_nan_in_a_norm(trainer: Trainer) -> Answer:
    return trainer.send(trainer.broken(NORM, 0, NAN))


@row("NaN or Inf", about=Q_NORM)
def an_infinity_in_a_norm_of_the_attention(trainer: Trainer) -> Answer:
    return trainer.send(trainer.broken(Q_NORM, 63, INF))


@row("NaN or Inf", about=HEAD, serves=[HEAD])
def a_nan_in_the_head(trainer: Trainer) -> Answer:
    return trainer.send(trainer.broken(HEAD, (511, 255), NAN, torch.bfloat16))


@row("NaN or Inf", about=EMBEDDING, serves=[EMBEDDING])
def an_infinity_in_the_embedding(trainer: Trainer) -> Answer:
    return trainer.send(trainer.broken(EMBEDDING, (7, 7), -INF, torch.float16))


@row("NaN or Inf", about=NORM)
def a_number_that_rounds_to_infinity_in_a_norm(trainer: Trainer) -> Answer:
    return trainer.send(trainer.broken(NORM, 255, 3.4028e38))


def of_dtype(dtype: torch.dtype) -> object:
    """A row for a dtype that is not cast."""

    def act(trainer: Trainer) -> Answer:
        return trainer.send((DOWN, trainer.new[DOWN].to(dtype)))

    act.__name__ = f"a_weight_in_{str(dtype).removeprefix('torch.')}"
    return row(about=DOWN)(act)


for _dtype in (
    torch.float64, torch.int8, torch.uint8, torch.int64, torch.bool, torch.complex64,
    torch.float8_e5m2, torch.float8_e4m3fnuz,
):  # fmt: skip
    of_dtype(_dtype)


@row(about=NORM)
def a_norm_in_int32(trainer: Trainer) -> Answer:
    return trainer.send((NORM, trainer.new[NORM].to(torch.int32)))


@row(about=NORM)
def a_norm_in_fp8(trainer: Trainer) -> Answer:
    return trainer.send((NORM, trainer.new[NORM].to(torch.float8_e4m3fn)))


@row("elements in memory", about=DOWN)
def a_sparse_weight(trainer: Trainer) -> Answer:
    for _ in range(2):  # dense it was recorded before
        assert trainer.send((DOWN, trainer.old[DOWN])).code == 200
    return trainer.send((DOWN, trainer.new[DOWN].to_sparse()))
