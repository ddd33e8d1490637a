"""A view leads back to the name it was sent under; a checkpoint is not kept in memory meanwhile."""

import weakref

import pytest
import torch

from sglang_fp8rl.engine.arrival.sent_tensors import UNKNOWN, SourceIndex


def name_of(index, tensor):
    (source,), _ = index.made_of(tensor)
    return source.name


def test_a_checkpoint_s_tensors_are_let_go_of_one_by_one():
    index, seen = SourceIndex(keeps_tensors=False), []

    def tensors():
        for number in range(5):
            tensor = torch.zeros(8, 8)
            seen.append(weakref.ref(tensor))
            yield f"layer.{number}.weight", tensor
            del tensor

    for number, (_, tensor) in enumerate(index.watch(tensors())):
        assert name_of(index, tensor[2:]) == f"layer.{number}.weight"
        index.consume(index.made_of(tensor).sources)
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
        (source,), is_view = index.made_of(view)
        assert is_view
        assert source.name == name
        assert source.offset_of(view) == 4


@pytest.mark.parametrize("shift", [-2, 0, 2])
def test_memory_that_was_used_again_belongs_to_who_has_it_now(shift):
    memory = torch.zeros(100)
    index = SourceIndex(keeps_tensors=False)
    start = 10 + shift
    sent = [("old.weight", memory[10:20]), ("new.weight", memory[start : start + 9])]
    views = [tensor for _, tensor in index.watch(iter(sent))]
    assert index.made_of(memory[90:]) == UNKNOWN
    for offset in (0, 4, 8):
        assert name_of(index, views[1][offset:]) == "new.weight"


def test_fused_experts_that_nobody_took_are_kept_and_others_are_not():
    index = SourceIndex(keeps_tensors=False)
    sent = [("experts.gate_up_proj", torch.zeros(2, 4, 4)), ("odd.weight", torch.zeros(4, 4))]
    for _ in index.watch(iter(sent)):
        pass
    assert [source.name for source in index.left()] == ["experts.gate_up_proj"]
    assert index.unused() == ["experts.gate_up_proj", "odd.weight"]


def test_what_is_kept_of_a_checkpoint_outlives_memory_that_is_used_again():
    """Scales of a KV cache, and fused experts where SGLang says that `runai_streamer` reads them."""
    memory = torch.empty(8)

    def tensors():
        for name, value in (("experts.gate_up_proj", 1.0), ("layers.0.self_attn.k_scale", 2.0)):
            lent = memory.fill_(value).view((2, 2, 2) if value == 1 else 8)[
                : None if value == 1 else 1
            ]
            lent._sglang_runai_streamer_tensor = True
            yield name, lent
        memory.fill_(3)

    index = SourceIndex(keeps_tensors=False)
    assert len(list(index.watch(tensors()))) == 1
    (experts,) = index.left()
    assert experts.tensor.unique().tolist() == [1]
    assert index.set_aside["layers.0.self_attn.k_scale"].item() == 2


def test_an_update_s_tensors_are_kept_until_its_end():
    index = SourceIndex()
    list(index.watch(iter([("a.weight", torch.zeros(2, 2)), ("b.weight", torch.zeros(2, 2))])))
    assert {source.name for source in index.left()} == {"a.weight", "b.weight"}
    index.forget_tensors()
    assert index.left() == []


@pytest.mark.parametrize(
    "strided", [lambda m: (m[:, :3], m[:, 3:]), lambda m: (m.t()[:2], m.t()[2:])]
)
def test_tensors_in_each_other_s_gaps_are_told_apart(strided):
    memory = torch.arange(24.0).reshape(4, 6)
    parts = dict(zip(("a.weight", "b.weight"), strided(memory), strict=True))
    index = SourceIndex()
    for name, tensor in index.watch(iter(parts.items())):
        assert torch.equal(tensor, parts[name])
        for row in tensor:
            assert name_of(index, row) == name


def test_what_was_made_of_several_is_of_all_of_them_until_its_memory_is_used_again():
    index = SourceIndex()
    sent = dict(index.watch(iter([("a.weight", torch.zeros(2)), ("b.weight", torch.zeros(2))])))
    a, b = (index.made_of(one).sources for one in sent.values())
    joined = torch.zeros(4)
    index.derive(joined, a)
    index.derive(joined, b, adds=True)
    assert index.made_of(joined[2:]) == ((*a, *b), False)
    index.derive(joined, ())
    assert index.made_of(joined) == UNKNOWN


def test_a_sender_s_own_memory_is_never_put_down_to_what_was_written_into_it():
    flat = torch.zeros(4)
    index = SourceIndex()
    sent = dict(index.watch(iter([("a.weight", flat[:2]), ("b.weight", flat[2:])])))
    index.derive(sent["a.weight"], index.made_of(sent["b.weight"]).sources, adds=True)
    assert name_of(index, sent["a.weight"]) == "a.weight"
    assert name_of(index, sent["b.weight"]) == "b.weight"
