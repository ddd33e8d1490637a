"""One rank of a veRL trainer: an FSDP2 model on the CPU whose weights go out by veRL's own code.

What `verl.workers.rollout.sglang_rollout.ServerAdapter.update_weights` does, with its parts: its
device mesh, its adapter, its buckets, SGLang's `update_weights`. Not by `ServerAdapter` itself, for
that looks its server up in Ray and moves every tensor to a GPU.

Reads commands as JSON lines from stdin and answers each with a line `{"answers": …}` on stdout.
Run with RANK and WORLD_SIZE as torchrun sets them.
"""

from __future__ import annotations

import asyncio
import functools
import json
import sys
from collections.abc import Iterator
from typing import Any

import torch
import verl  # noqa: F401  # its plugin entry point is all the set-up there is
from sglang.srt.weight_sync.utils import update_weights
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM
from verl.workers.rollout.sglang_rollout.http_server_engine import AsyncHttpServerAdapter
from verl.workers.rollout.sglang_rollout.utils import get_named_tensor_buckets

from sglang_fp8rl import fetch_plan
from sglang_fp8rl.trainer import quantize_for_refit

NAMES = ("dp", "infer_tp", "infer_pp")


@functools.cache
def sharded_model(path: str, dtype: torch.dtype) -> torch.nn.Module:
    """As veRL's FSDP2 engine: every layer, then the rest, over all ranks."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype)
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def full_tensors(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """As veRL's `get_per_tensor_param`: one full tensor at a time."""
    for name, parameter in model.state_dict().items():
        yield name, parameter.full_tensor() if isinstance(parameter, DTensor) else parameter


async def refit(command: dict[str, Any]) -> list[Any]:
    """One full update of one server; what it answered to each bucket.

    With more ranks than the server has (tp = 1), the others are replicas of it in veRL; here they
    have no server and take part in gathering the weights only.
    """
    world = torch.distributed.get_world_size()
    tp_size = command["tp_size"]
    mesh = init_device_mesh("cpu", (world // tp_size, tp_size, 1), mesh_dim_names=NAMES)
    has_server = mesh["dp"].get_local_rank() == 0
    is_leader = has_server and mesh["infer_tp"].get_local_rank() == 0
    engine: Any = None
    if is_leader:
        engine = AsyncHttpServerAdapter(
            model_path=command["path"],
            host="127.0.0.1",
            port=command["port"],
            launch_server=False,
            trust_remote_code=False,
        )
    weights = full_tensors(sharded_model(command["path"], getattr(torch, command["dtype"])))
    if command.get("is_quantized"):
        plan = fetch_plan(f"http://127.0.0.1:{command['port']}")
        weights = quantize_for_refit(weights, plan, pack_pairs=command.get("pack_pairs", False))
    answers = []
    async for bucket in get_named_tensor_buckets(weights, command["bucket_bytes"]):
        if has_server:
            answer = await update_weights(
                engine=engine,
                params_batch=[(name + command.get("suffix", ""), t) for name, t in bucket],
                device_mesh_key="infer_tp",
                device_mesh=mesh,
            )
            answers.append(answer)
    if is_leader:
        answers.append(await engine.flush_cache())
    return answers


def main() -> None:
    torch.distributed.init_process_group("gloo")
    for line in sys.stdin:
        try:
            answer: dict[str, Any] = {"answers": asyncio.run(refit(json.loads(line)))}
        except Exception as error:  # noqa: BLE001  # told to the test, which may expect it
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
