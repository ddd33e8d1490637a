"""Names and shapes that don't fit the model."""

from __future__ import annotations

import torch

from .fault import Group
from .trainer import DOWN, EMBEDDING, MISSPELT, NORM, QUERY, UP, Answer, Trainer

GROUP = Group("Names and shapes")
row = GROUP.row
NO_PARAMETER = "no parameter takes"
VALUE = "model.layers.0.self_attn.v_proj.weight"


def unknown(word: str, name: str, like: str = DOWN, *told: str, about: str = "") -> None:
    """A row for the tensor of a parameter, under a name that the model has not."""
    row(NO_PARAMETER, *told, about=about, word=word)(
        lambda trainer: trainer.send((name, trainer.new[like]))
    )


unknown("a_misspelt_name", MISSPELT, DOWN, "Near matches", DOWN, about=MISSPELT)
unknown(
    "a_misspelt_name_of_a_fused_weight",
    VALUE.replace("weight", "wieght"),
    VALUE,
    about="v_proj.wieght",
)
unknown("a_layer_that_the_model_has_not", DOWN.replace(".0.", ".9."), DOWN, about="model.layers.9.")
unknown("a_name_with_a_prefix_too_much", f"module.{DOWN}")
unknown("a_name_without_its_last_part", DOWN.removesuffix(".weight"))
unknown("an_empty_name", "")
unknown("a_name_of_a_megabyte", "model." + "x" * (1 << 20), NORM)
unknown("a_name_that_is_not_ascii", "model.größe\n\0weight", NORM)
unknown("an_expert_of_a_model_without_experts", "model.layers.0.mlp.experts.0.down_proj.weight")
unknown("a_bias_that_the_model_has_not", DOWN.replace(".weight", ".bias"), NORM)


@row(NO_PARAMETER, about="donw", serves=[UP, NORM])
def a_misspelt_name_among_good_ones(trainer: Trainer) -> Answer:
    wrong = (MISSPELT, trainer.new[DOWN])
    return trainer.send(trainer.fresh(UP), wrong, trainer.fresh(NORM))


@row("twice", about=DOWN)
def one_name_twice_in_a_call(trainer: Trainer) -> Answer:
    return trainer.send(trainer.fresh(DOWN), (DOWN, trainer.old[DOWN]))


def of_shape(word: str, name: str, *shape: int) -> None:
    """A row for a tensor of another shape than the model's."""
    row("shape", str(tuple(shape)), about=name, word=word)(
        lambda trainer: trainer.send((name, torch.ones(shape)))
    )


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
