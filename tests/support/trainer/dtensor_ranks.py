"""`python dtensor_ranks.py` with RANK and WORLD_SIZE: what `test_trainer_quantize` checks on two ranks."""

from __future__ import annotations

import json

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor

from sglang_fp8rl.errors import RefitError
from sglang_fp8rl.trainer import LocalShard, assemble, full_tensors, quantize_for_refit
from support.plans import BLOCKWISE, PER_CHANNEL, make_plan

# Rows: two blocks and one of 44; the second rank of the per-channel weight has fewer rows.
PLAN = make_plan({"a.weight": (BLOCKWISE, (300, 256)), "b.weight": (PER_CHANNEL, (71, 96))})
ODD = make_plan({"a.weight": (BLOCKWISE, (512, 256))})


def main() -> None:
    mesh = init_device_mesh("cpu", (2,))
    generator = torch.Generator().manual_seed(0)
    a = torch.randn(300, 256, generator=generator)
    b = torch.randn(71, 96, generator=generator)
    whole = dict(quantize_for_refit([("a.weight", a), ("b.weight", b)], PLAN))
    for placed in (Replicate(), Shard(1)):
        sent = [
            ("a.weight", distribute_tensor(a, mesh, [placed])),
            ("b.weight", distribute_tensor(b, mesh, [Shard(0)])),
        ]
        quantized = dict(quantize_for_refit(sent, PLAN))
        assert quantized["a.weight"].placements == (placed,)
        gathered = dict(full_tensors(quantized.items()))
        assert gathered.keys() == whole.keys()
        for name, tensor in gathered.items():
            same = tensor.contiguous().view(torch.uint8) == whole[name].view(torch.uint8)
            assert bool(same.all()), name
    c = torch.randn(512, 256, generator=generator)
    even = dict(
        full_tensors(
            quantize_for_refit([("a.weight", distribute_tensor(c, mesh, [Shard(0)]))], ODD)
        )
    )
    single = dict(quantize_for_refit([("a.weight", c)], ODD))
    assert torch.equal(even["a.weight_scale_inv"], single["a.weight_scale_inv"])
    # A box that its own ranks share: rows 256 to 512, of which each has half.
    inner = LocalShard(distribute_tensor(c[256:], mesh, [Shard(0)]), (512, 256), (256, 0))
    mine = 256 + 128 * torch.distributed.get_rank()
    for name, shard in quantize_for_refit([("a.weight", inner)], ODD):
        start, rows = (mine, 128) if name == "a.weight" else (mine // 128, 1)
        expected = single[name][start : start + rows]
        assert shard.start == (start, 0)
        assert torch.equal(shard.tensor.view(torch.uint8), expected.view(torch.uint8))
    ranks = (distribute_tensor(c[at : at + 256], mesh, [Replicate()]) for at in (0, 256))
    boxes = [LocalShard(one, (512, 256), (256 * at, 0)) for at, one in enumerate(ranks)]
    assert torch.equal(assemble("a.weight", boxes), c)
    for tensor in (
        distribute_tensor(a, mesh, [Shard(0)]),  # 150 rows each
        torch.distributed.tensor.DTensor.from_local(a, mesh, [Partial()]),
    ):
        with pytest.raises(RefitError, match=r"full_tensor\(\)"):
            list(quantize_for_refit([("a.weight", tensor)], PLAN))
    if torch.distributed.get_rank() == 0:
        print(json.dumps("as the whole"), flush=True)
    torch.distributed.destroy_process_group()


main()
