"""Quantizing by a plan: full tensors, shards, and what is refused. No server."""

from __future__ import annotations

import copy
import json
import math
import re
from itertools import pairwise

import jsonschema
import pytest
import torch
from support.by_definition import quantize_blockwise, quantize_per_channel
from support.numerics.numerics_cases import ROUNDINGS, same_bits
from support.plans import BLOCKWISE, PER_CHANNEL, PLAIN, make_plan, plan_schema
from support.trainer.ranks import said_by_ranks
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed._shard.sharded_tensor import Shard as LocalPart
from torch.distributed._shard.sharded_tensor import init_from_local_shards
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.testing._internal.two_tensor import TwoTensor

from sglang_fp8rl.errors import QuantizationError, RefitError
from sglang_fp8rl.formats.format import BlockGrid
from sglang_fp8rl.trainer import (
    LocalShard,
    WireStats,
    added_up,
    assemble,
    fingerprint_of,
    quantize_for_refit,
)
from sglang_fp8rl.wire.plan import RefitPlan
from sglang_fp8rl.wire.sendable import sendable

SHAPES = {
    "a.weight": (BLOCKWISE, (300, 256)),
    "b.weight": (PER_CHANNEL, (70, 96)),
    "norm.weight": (PLAIN, (96,)),
}
PLAN = make_plan(SHAPES)


def weights(seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, (_, shape) in SHAPES.items()}


def test_the_plan_of_these_tests_is_one_by_the_schema():
    jsonschema.Draft202012Validator(plan_schema()).validate(PLAN.as_dict())


def test_a_document_that_was_changed_or_is_another_s_is_refused():
    document = PLAN.as_dict()
    assert RefitPlan.from_dict(json.loads(json.dumps(document))) == PLAN
    changed = copy.deepcopy(document)
    changed["tensors"]["norm.weight"]["shape"] = [1]
    with pytest.raises(RefitError, match="changed after it was made"):
        RefitPlan.from_dict(changed)
    for broken in ({**document, "version": 2}, {"format": "x"}, ["no"]):
        with pytest.raises(RefitError, match="plan"):
            RefitPlan.from_dict(broken)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("options", ROUNDINGS)
def test_codes_and_scales_are_the_reference_s_whatever_the_options(dtype, options):
    rounded = options["round_to_bf16"]
    plan = make_plan(SHAPES, use_weight_pow2_scale=options["pow2_scale"], round_to_bf16=rounded)
    sent = {name: weight.to(dtype) for name, weight in weights().items()}
    got = dict(quantize_for_refit(sent.items(), plan))
    codes, scale = quantize_blockwise(sent["a.weight"], **options)
    assert same_bits(got.pop("a.weight"), codes)
    assert torch.equal(got.pop("a.weight_scale_inv"), scale)
    codes, scale = quantize_per_channel(sent["b.weight"], **options)
    assert same_bits(got.pop("b.weight"), codes)
    assert torch.equal(got.pop("b.weight_scale"), scale)
    assert got.pop("norm.weight") is sent["norm.weight"]
    assert not got


def test_a_tied_head_is_left_out_and_everything_is_counted():
    stats = WireStats()
    items = [*weights().items(), ("lm_head.weight", torch.zeros(3))]
    got = list(quantize_for_refit(items, PLAN, stats=stats))
    assert [name for name, _ in got if name == "lm_head.weight"] == []
    assert stats.nbytes == sum(tensor.nbytes for _, tensor in got)
    assert stats.nbytes_fp32 == 2 * stats.nbytes_bf16 == 4 * (300 * 256 + 70 * 96 + 96)
    assert (stats.tensors, stats.quantized) == (3, 2)


def test_scales_of_the_kv_cache_pass_and_what_looks_like_one_is_refused():
    scale = ("model.layers.0.self_attn.k_scale", torch.ones(1))
    assert list(quantize_for_refit([scale], PLAN)) == [scale]
    with pytest.raises(RefitError, match="not in the plan"):
        list(quantize_for_refit([("model.layers.0.self_attn.k_scales", torch.ones(1))], PLAN))


def test_names_that_the_server_only_warns_of_pass_and_a_typing_error_is_refused_elsewhere():
    other, warns = [("other", torch.ones(1))], make_plan(SHAPES, unknown_names="warn")
    assert list(quantize_for_refit(other, warns)) == other
    head = ("lm_head.weight", torch.zeros(3))
    assert list(quantize_for_refit([head], warns)) == []
    for call in (quantize_for_refit, fingerprint_of):
        with pytest.raises(RefitError, match="not in the plan"):
            list(call(other, PLAN))


@pytest.mark.parametrize("name", ["model.layers.0.self_attn.k_scale", "other"])
def test_names_without_a_number_are_unproven_over_all_ranks(name):
    plan = make_plan(SHAPES, unknown_names="warn")
    one = fingerprint_of([*weights().items(), (name, torch.ones(1))], plan)
    whole = added_up([one, fingerprint_of(weights().items(), plan)], plan)
    assert one.unproven.keys() == whole.unproven.keys() == {name}
    assert whole.numbers == fingerprint_of(weights().items(), PLAN).numbers


def test_fused_experts_go_one_by_one_where_the_plan_has_them_so():
    shapes = {
        f"experts.{expert}.{part}_proj.weight": (BLOCKWISE, (128, 256))
        for expert in range(2)
        for part in ("gate", "up")
    }
    fused = torch.randn(2, 256, 256, generator=torch.Generator().manual_seed(0))
    got = dict(quantize_for_refit([("experts.gate_up_proj", fused)], make_plan(shapes)))
    assert {name for name in got if name.endswith(".weight")} == shapes.keys()
    for expert in range(2):
        for part, rows in (("gate", slice(0, 128)), ("up", slice(128, 256))):
            codes, scale = quantize_blockwise(fused[expert, rows])
            name = f"experts.{expert}.{part}_proj.weight"
            assert same_bits(got[name], codes)
            assert torch.equal(got[f"{name}_scale_inv"], scale)
    with pytest.raises(RefitError, match="not in the plan"):
        list(quantize_for_refit([("other.gate_up_proj", fused)], make_plan(shapes)))


def test_it_is_lazy_so_one_quantized_tensor_is_held_at_a_time():
    seen = []

    def source():
        for name, weight in weights().items():
            seen.append(name)
            yield name, weight

    stream = quantize_for_refit(source(), PLAN)
    next(stream)
    assert seen == ["a.weight"]


def shards_of(full: torch.Tensor, rows: list[int], columns: list[int]) -> list[LocalShard]:
    """Boxes between the given cuts."""
    cut_rows, cut_columns = [0, *rows, full.shape[0]], [0, *columns, full.shape[1]]
    return [
        LocalShard(full[r:rr, c:cc], tuple(full.shape), (r, c))
        for r, rr in pairwise(cut_rows)
        for c, cc in pairwise(cut_columns)
    ]


@pytest.mark.parametrize(("rows", "columns"), [([128], []), ([], [128]), ([128, 256], [128])])
def test_shards_of_whole_blocks_make_the_bytes_of_the_whole(rows, columns):
    full = weights()["a.weight"]
    parts = [
        dict(quantize_for_refit([("a.weight", shard)], PLAN))
        for shard in shards_of(full, rows, columns)
    ]
    codes, scale = quantize_blockwise(full)
    for name, expected in (("a.weight", codes), ("a.weight_scale_inv", scale)):
        joined = assemble(name, [part[name] for part in parts])
        assert same_bits(joined, expected)
    with pytest.raises(RefitError, match="are in no shard"):
        assemble("a.weight", [part["a.weight"] for part in parts[1:]])


def test_shards_that_overlap_have_the_same_bytes():
    full = torch.tensor([[0.0, torch.nan], [1.0, -0.0]])
    parts = [LocalShard(full[:, :1], (2, 2), (0, 0)), LocalShard(full, (2, 2), (0, 0))]
    assert same_bits(assemble("a", parts), full)
    with pytest.raises(RefitError, match=r"a: other values at \(0, 0\)"):
        assemble("a", [*parts, LocalShard(-full[:1], (2, 2), (0, 0))])


def test_memory_that_was_freed_is_refused_by_name():
    freed = torch.ones(4, 4)
    freed.untyped_storage().resize_(0)
    for read in (sendable, lambda sent: quantize_for_refit(sent, PLAN)):
        with pytest.raises(RefitError, match=r"norm\.weight: .* FSDP frees"):
            list(read([("norm.weight", freed)]))


def test_rows_of_a_per_channel_weight_may_be_cut_anywhere_and_columns_not():
    full = weights()["b.weight"]
    parts = [
        dict(quantize_for_refit([("b.weight", shard)], PLAN)) for shard in shards_of(full, [7], [])
    ]
    codes, scale = quantize_per_channel(full)
    assert same_bits(assemble("b", [part["b.weight"] for part in parts]), codes)
    assert torch.equal(assemble("b", [part["b.weight_scale"] for part in parts]), scale)
    with pytest.raises(RefitError, match="inside a block"):
        list(quantize_for_refit([("b.weight", shards_of(full, [], [48])[0])], PLAN))


def test_a_rank_without_rows_sends_empty_parts():
    empty = LocalShard(torch.empty(0, 256), (300, 256), (300, 0))
    got = dict(quantize_for_refit([("a.weight", empty)], PLAN))
    assert got["a.weight"].tensor.shape == (0, 256)
    assert got["a.weight_scale_inv"].tensor.shape == (0, 2)
    assert got["a.weight_scale_inv"].start == (3, 0)


def said_on_all_ranks(shape, mesh_shape, placements, read, dtype=torch.float32):
    """What `read` raises for the DTensor that each rank of a mesh holds: one after the other, so without the others."""
    size, said = math.prod(mesh_shape), []
    for rank in range(size):
        torch.distributed.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
        try:
            mesh = torch.distributed.init_device_mesh("cpu", mesh_shape)
            local, _ = compute_local_shape_and_global_offset(shape, mesh, placements)
            full = torch.empty(shape, device="meta")
            sent = DTensor.from_local(
                torch.ones(local, dtype=dtype),
                mesh,
                placements,
                run_check=False,
                shape=full.shape,
                stride=full.stride(),
            )
            with pytest.raises((RefitError, QuantizationError)) as told:
                read(sent)
            said.append(str(told.value))
        finally:
            torch.distributed.destroy_process_group()
    return said


def quantized(sent, plan):
    return list(quantize_for_refit(sent, plan))


INSIDE = r"a\.weight: shard \[{}\] of .* inside a block"
CUT = {
    "ranks without rows": ((300, 128), (11,), [Shard(0)], "0:28, 0:128"),
    "a last rank of one block": ((192, 128), (3,), [Shard(0)], "0:64, 0:128"),
    "a first rank of one block": ((510, 128), (2, 2), [Shard(0)] * 2, "128:255, 0:128"),
    "columns": ((256, 192), (2, 3), [Shard(0), Shard(1)], "0:128, 0:64"),
    "ranks without columns": ((128, 3), (2, 2), [Shard(1)] * 2, "0:128, 0:1"),
}


@pytest.mark.parametrize("as_a_box", [False, True])
@pytest.mark.parametrize("read", [quantized, fingerprint_of])
@pytest.mark.parametrize(("shape", "mesh", "placed", "cut"), CUT.values(), ids=CUT)
def test_where_one_rank_s_shard_cuts_a_block_all_ranks_say_so(
    shape, mesh, placed, cut, read, as_a_box
):
    rows, columns = shape
    plan = make_plan({"a.weight": (BLOCKWISE, (rows + 256 * as_a_box, columns))})

    def sent(one):
        box = LocalShard(one, plan.tensors["a.weight"].shape, (256, 0)) if as_a_box else one
        return read([("a.weight", box)], plan)

    first, *others = said_on_all_ranks(shape, mesh, placed, sent)
    assert set(others) == {first}
    assert as_a_box or re.match(INSIDE.format(cut), first)


def test_boxes_of_all_ranks_are_looked_at_once_for_each_shape(monkeypatch):
    asked, is_whole = [], BlockGrid.is_whole

    def counted(grid, *box):
        asked.append(box)
        return is_whole(grid, *box)

    monkeypatch.setattr(BlockGrid, "is_whole", counted)
    plan = make_plan({f"{n}.weight": (PER_CHANNEL, (2048, 33)) for n in range(99)})
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=1024)
    try:
        mesh = torch.distributed.init_device_mesh("cpu", (1024,))
        part = DTensor.from_local(torch.ones(2, 33), mesh, [Shard(0)])
        assert len(quantized(((name, part) for name in plan.tensors), plan)) == 2 * 99
    finally:
        torch.distributed.destroy_process_group()
    assert len(asked) < 2 * 1024


@pytest.mark.parametrize("read", [quantized, fingerprint_of])
def test_where_a_shard_is_not_finite_its_rows_are_told_from_the_tensor_s(read):
    plan, rows = make_plan({"a.weight": (BLOCKWISE, (384, 128))}), torch.ones(128, 128)
    rows[44] = float("nan")
    shard = LocalShard(rows, (384, 128), (256, 0))
    with pytest.raises(
        QuantizationError, match=r"a\.weight, a shard that starts at \[256, 0\]: NaN"
    ):
        read([("a.weight", shard)], plan)


@pytest.mark.parametrize("read", [quantized, fingerprint_of])
@pytest.mark.parametrize(
    ("shape", "dtype", "match"),
    [((2, 96), torch.float64, "float64"), ((2, 95), torch.float32, "takes the full")],
)
def test_a_rank_without_rows_refuses_what_the_others_do(read, shape, dtype, match):
    plan = make_plan({"a.weight": (PER_CHANNEL, (2, 96))})
    said = said_on_all_ranks(
        shape, (3,), [Shard(0)], lambda one: read([("a.weight", one)], plan), dtype
    )
    assert len(set(said)) == 1
    assert match in said[0]


@pytest.mark.parametrize(
    ("name", "tensor", "match"),
    [
        ("a.wieght", torch.zeros(2), r"not in the plan.*Near matches: a\.weight"),
        ("a.lora_A.weight", torch.zeros(2), "of an adapter .*merge it before sending(?!.*Near)"),
        ("a.weight", torch.zeros(300, 255), r"takes the full, unsharded \(300, 256\)"),
        ("norm.weight", torch.zeros(95), r"takes the full"),
        ("a.weight", LocalShard(torch.zeros(100, 256), (300, 256), (0, 0)), "inside a block"),
        ("a.weight", [1.0], "a list"),
    ],
)
def test_what_the_plan_does_not_say_is_refused_with_the_remedy(name, tensor, match):
    with pytest.raises(RefitError, match=match):
        list(quantize_for_refit([(name, tensor)], PLAN))


def test_nan_is_refused_naming_the_tensor_and_the_block():
    weight = weights()["a.weight"]
    weight[200, 130] = float("nan")
    with pytest.raises(QuantizationError, match=r"a\.weight: NaN.*block \(1, 1\), rows 128:256"):
        list(quantize_for_refit([("a.weight", weight)], PLAN))
    with pytest.raises(QuantizationError, match="float64"):
        list(quantize_for_refit([("a.weight", torch.zeros(300, 256).double())], PLAN))


@pytest.mark.parametrize("value", [torch.nan, torch.inf, 3.4e38])  # the last is Inf in BF16
def test_what_stays_in_high_precision_and_is_not_finite_has_no_number(value):
    bad = weights()
    bad["norm.weight"][3] = value
    with pytest.raises(QuantizationError, match=r"norm\.weight: NaN or Inf in row 0 of 1"):
        fingerprint_of(bad.items(), PLAN)


def test_a_shard_may_be_described_by_lists():
    weight = weights()["a.weight"]
    shard = LocalShard(weight[:128], [300, 256], [0, 0])
    got = dict(quantize_for_refit([("a.weight", shard)], PLAN))["a.weight"].tensor
    assert same_bits(got, quantize_blockwise(weight)[0][:128])


@pytest.fixture
def one_rank(tmp_path):
    """A process group of this process."""
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1
    )
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("one_rank")
def test_a_dtensor_that_was_not_gathered_is_refused_by_name_where_it_has_to_be():
    shapes = {f"experts.0.{one}_proj.weight": (BLOCKWISE, (128, 256)) for one in ("gate", "up")}
    mesh = torch.distributed.init_device_mesh("cpu", (1,))
    fused = distribute_tensor(torch.ones(1, 256, 256), mesh, [Shard(0)])
    name = "experts.gate_up_proj"
    with pytest.raises(RefitError, match=rf"{name}: a DTensor; .*\.full_tensor\(\)"):
        list(quantize_for_refit([(name, fused)], make_plan(shapes)))
    with pytest.raises(RefitError, match=r"w: a DTensor; .*full_tensors\(named_tensors\)"):
        list(sendable([("w", fused)]))


@pytest.mark.usefixtures("one_rank")
def test_a_sharded_tensor_of_fsdp1_is_refused_by_name():
    part = LocalPart.from_tensor_and_offsets(torch.ones(2, 3), [0, 0], 0)
    with pytest.raises(RefitError, match=r"w: a ShardedTensor; .*a full state dict"):
        list(sendable([("w", init_from_local_shards([part], [2, 3]))]))


def dtensor_of(local):
    mesh = torch.distributed.init_device_mesh("cpu", (1,))
    return DTensor.from_local(local, mesh, [Shard(0)], run_check=False)


def freed_behind_another(held):
    """A view of a flat tensor, as FSDP1's parameters are, that does not lie in front."""
    flat = torch.cat([held.reshape(-1), held.reshape(-1)])
    view = flat.chunk(2)[1].view(held.shape)
    flat.untyped_storage().resize_(0)
    return view


WITHOUT_MEMORY = {
    "freed, behind another": freed_behind_another,
    "on meta": lambda held: held.to("meta"),
    "sparse": torch.Tensor.to_sparse,
    "a wrapper of others": lambda held: TwoTensor(held, held),
    "a shard on meta": lambda held: dtensor_of(held.to("meta")),
    "a shard that wraps others": lambda held: dtensor_of(TwoTensor(held, held)),
}


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("made", WITHOUT_MEMORY.values(), ids=WITHOUT_MEMORY)
def test_what_has_no_elements_where_kernels_read_is_refused_by_name(made):
    sent = made(weights()["a.weight"])
    for read in (quantize_for_refit, fingerprint_of):
        with pytest.raises(RefitError, match=r"a\.weight: a \w+( with no elements.*)?; .*dense"):
            list(read([("a.weight", sent)], PLAN))


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize(
    "made", [AsyncCollectiveTensor, lambda one: dtensor_of(AsyncCollectiveTensor(one))]
)
def test_what_a_collective_still_brings_is_waited_for(made):
    sent = weights()
    on_its_way = {name: made(one) for name, one in sent.items()}
    assert fingerprint_of(on_its_way.items(), PLAN) == fingerprint_of(sent.items(), PLAN)


def test_a_shard_outside_of_its_tensor_is_refused():
    with pytest.raises(RefitError, match="lies inside"):
        LocalShard(torch.zeros(10, 10), (300, 256), (295, 0))


def test_dtensors_of_two_ranks_make_the_bytes_of_the_whole():
    """Two real processes over gloo: shards, replicas, and the gather of FP8."""
    assert said_by_ranks("dtensor_ranks.py", size=2) == "as the whole"
