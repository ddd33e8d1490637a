"""What an error says to do."""

from __future__ import annotations

import pytest

from sglang_fp8rl.errors import is_of_an_adapter, listed, remedy_for_unknown

WEIGHT = "model.layers.0.mlp.down_proj.weight"


def test_names_that_peft_makes_are_told_from_those_of_weights():
    peft = pytest.importorskip("peft")
    nn = pytest.importorskip("torch").nn
    names = set()
    # Without BOFT, which compiles a kernel for CUDA when it is made.
    for config in (
        peft.LoraConfig(target_modules=["0"], modules_to_save=["1"], use_dora=True),
        peft.IA3Config(target_modules=["0"], feedforward_modules=[]),
        peft.LoHaConfig(target_modules=["0"]),
        peft.LoKrConfig(target_modules=["0"]),
        peft.OFTConfig(target_modules=["0"], oft_block_size=0, r=2),
        peft.VeraConfig(target_modules=["0"]),
    ):
        model = peft.get_peft_model(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), config)
        names |= set(model.state_dict())
        names |= set(peft.get_peft_model_state_dict(model))
        names |= set(model.base_model.model.state_dict()) - {"1.weight", "1.bias"}
    assert len(names) > 30
    assert {name for name in names if not is_of_an_adapter(name)} == set()


@pytest.mark.parametrize("name", [WEIGHT, "model.layers.0.base_layer_norm.weight", "lora.weight"])
def test_other_names_are_of_no_adapter(name):
    assert not is_of_an_adapter(name)
    assert remedy_for_unknown(name.replace("weight", "wieght"), [name], "Or so.") == (
        f"Near matches: {name}. Or so."
    )


def test_an_adapter_is_neither_a_misspelt_weight_nor_to_be_dropped():
    said = remedy_for_unknown(WEIGHT.replace("weight", "lora_A.weight"), [WEIGHT], "Drop it.")
    assert "Near matches" not in said
    assert "Drop it." not in said
    assert "merge it before sending" in said


def test_a_name_that_can_t_be_read_is_shown_in_quotes_with_what_is_in_it():
    names = [WEIGHT, f"{WEIGHT} ", WEIGHT.replace("o", "\u043e"), "a\nb", ""]
    assert listed(names[:1]) == WEIGHT
    said = [listed([name]) for name in names[1:]]
    assert said == [ascii(name) for name in names[1:]]
    assert all(one.isascii() and one.isprintable() for one in said)
