"""A view leads back to the name it was sent under; a checkpoint is not kept in memory meanwhile."""

import weakref

import pytest
import torch

from sglang_fp8rl.engine.arrival.sent_tensors import SourceIndex


def test_a_checkpoint_s_tensors_are_let_go_of_one_by_one():
    index, seen = SourceIndex(keeps_tensors=False), []

    def tensors():
        for number in range(5):
            tensor = torch.zeros(8, 8)
            seen.append(weakref.ref(tensor))
            yield f"layer.{number}.weight", tensor
            del tensor

    for number, (_, tensor) in enumerate(index.watch(tensors())):
        assert index.find(tensor[2:]).name == f"layer.{number}.weight"
        del tensor
        assert all(ref() is None for ref in seen[:number])


def test_a_view_that_a_pool_still_holds_is_found_later():
    index, held = SourceIndex(keeps_tensors=False), {}
    sent = ((f"experts.{n}.weight", torch.full((4, 4), float(n))) for n in range(50))
    for name, tensor in index.watch(sent):
        if name.endswith(("3.weight", "7.weight")):
            held[name] = tensor[1:3]
        del tensor
    for name, view in held.items():
        source = index.find(view)
        assert source.name == name
        assert source.offset_of(view) == 4


@pytest.mark.parametrize("shift", [-2, 0, 2])
def test_memory_that_was_used_again_belongs_to_who_has_it_now(shift):
    memory = torch.zeros(100)
    index = SourceIndex(keeps_tensors=False)
    start = 10 + shift
    sent = [("old.weight", memory[10:20]), ("new.weight", memory[start : start + 9])]
    views = [tensor for _, tensor in index.watch(iter(sent))]
    index.find(memory[90:])  # not in any
    for offset in (0, 4, 8):
        assert index.find(views[1][offset:]).name == "new.weight"


def test_fused_experts_that_nobody_took_are_kept_and_others_are_not():
    index = SourceIndex(keeps_tensors=False)
    sent = [("experts.gate_up_proj", torch.zeros(2, 4, 4)), ("odd.weight", torch.zeros(4, 4))]
    for _ in index.watch(iter(sent)):
        pass
    assert [source.name for source in index.left()] == ["experts.gate_up_proj"]
    assert index.unused() == ["experts.gate_up_proj", "odd.weight"]


def test_an_update_s_tensors_are_kept_until_its_end():
    index = SourceIndex()
    list(index.watch(iter([("a.weight", torch.zeros(2, 2)), ("b.weight", torch.zeros(2, 2))])))
    assert {source.name for source in index.left()} == {"a.weight", "b.weight"}
    index.forget_tensors()
    assert index.left() == []
