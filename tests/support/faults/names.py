"""Names and shapes that don't fit the model."""

from __future__ import annotations

import torch

from .fault import Group
from .trainer import DOWN, EMBEDDING, NORM, QUERY, UP, Answer, Trainer

GROUP = Group("Names and shapes")
row = GROUP.row
NO_PARAMETER = "no parameter takes"


@row(NO_PARAMETER, "Near matches", DOWN, about=DOWN.replace("down", "donw"))
def a_misspelt_name(trainer: Trainer) -> Answer:
    return trainer.send((DOWN.replace("down", "donw"), trainer.new[DOWN]))


@row(NO_PARAMETER, about="v_proj.wieght")
def a_misspelt_name_of_a_fused_weight(trainer: Trainer) -> Answer:
    name = "model.layers.0.self_attn.v_proj.weight"
    return trainer.send((name.replace("weight", "wieght"), trainer.new[name]))


@row(NO_PARAMETER, about="model.layers.9.")
def a_layer_that_the_model_has_not(trainer: Trainer) -> Answer:
    return trainer.send((DOWN.replace(".0.", ".9."), trainer.new[DOWN]))


@row(NO_PARAMETER)
def a_name_with_a_prefix_too_much(trainer: Trainer) -> Answer:
    return trainer.send((f"module.{DOWN}", trainer.new[DOWN]))


@row(NO_PARAMETER)
def a_name_without_its_last_part(trainer: Trainer) -> Answer:
    return trainer.send((DOWN.removesuffix(".weight"), trainer.new[DOWN]))


@row(NO_PARAMETER)
def an_empty_name(trainer: Trainer) -> Answer:
    return trainer.send(("", trainer.new[DOWN]))


@row(NO_PARAMETER)
def a_name_of_a_megabyte(trainer: Trainer) -> Answer:
    return trainer.send(("model." + "x" * (1 << 20), trainer.new[NORM]))


@row(NO_PARAMETER)
def a_name_that_is_not_ascii(trainer: Trainer) -> Answer:
    return trainer.send(("model.größe\n\0weight", trainer.new[NORM]))


@row(NO_PARAMETER)
def an_expert_of_a_model_without_experts(trainer: Trainer) -> Answer:
    return trainer.send(("model.layers.0.mlp.experts.0.down_proj.weight", trainer.new[DOWN]))


@row(NO_PARAMETER)
def a_bias_that_the_model_has_not(trainer: Trainer) -> Answer:
    return trainer.send((DOWN.replace(".weight", ".bias"), trainer.new[NORM]))


@row(NO_PARAMETER, about="donw", serves=[UP, NORM])
def a_misspelt_name_among_good_ones(trainer: Trainer) -> Answer:
    wrong = (DOWN.replace("down", "donw"), trainer.new[DOWN])
    return trainer.send(trainer.fresh(UP), wrong, trainer.fresh(NORM))


@row("twice", about=DOWN)
def one_name_twice_in_a_call(trainer: Trainer) -> Answer:
    return trainer.send(trainer.fresh(DOWN), (DOWN, trainer.old[DOWN]))


def of_shape(word: str, name: str, *shape: int) -> None:
    """A row for a tensor of another shape than the model's."""

    def act(trainer: Trainer) -> Answer:
        return trainer.send((name, torch.ones(shape)))

    act.__name__ = word
    row("shape", str(tuple(shape)), about=name)(act)


of_shape("a_weight_with_a_column_too_few", DOWN, 256, 511)
of_shape("a_weight_with_a_row_too_many", UP, 513, 256)
of_shape("a_weight_that_is_transposed", DOWN, 512, 256)
of_shape("a_shard_instead_of_the_whole_weight", QUERY, 128, 256)
of_shape("a_fused_weight_instead_of_its_parts", QUERY, 512, 256)
of_shape("a_weight_as_a_vector", DOWN, 256 * 512)
of_shape("a_weight_with_a_dimension_too_many", DOWN, 1, 256, 512)
of_shape("a_weight_of_no_elements", DOWN, 0, 512)
of_shape("a_norm_that_is_too_long", NORM, 512)
of_shape("a_norm_that_is_a_number", NORM)
of_shape("an_embedding_for_another_vocabulary", EMBEDDING, 511, 256)


@row("shape", about=DOWN, serves=[UP])
def a_wrong_shape_after_a_good_tensor(trainer: Trainer) -> Answer:
    """The one before it is stored; the one behind it has no turn and is named."""
    answer = trainer.send(trainer.fresh(UP), (DOWN, torch.ones(3, 3)), trainer.fresh(NORM))
    assert NORM in answer.text, answer
    return answer


@row("NaN or Inf", "shape", about=DOWN, serves=[UP])
def two_mistakes_in_one_call(trainer: Trainer) -> Answer:
    """Both are named."""
    return trainer.send(trainer.broken(UP, (0, 0), float("nan")), (DOWN, torch.ones(3, 3)))
