"""One rank of a veRL trainer: an FSDP2 model on the CPU whose weights go out by veRL's own code.

Either by its parts, as a veRL without this package's adapter would: its device mesh, its HTTP
adapter, its buckets, SGLang's `update_weights`. Or by the adapter that this package registers with
it. Only the server is not looked up in Ray.

Reads commands as JSON lines from stdin and answers each with a line `{"answers": …}` on stdout.
Run with RANK and WORLD_SIZE as torchrun sets them.
"""

from __future__ import annotations

import asyncio
import functools
import json
import os
import sys
from collections.abc import Iterable, Iterator
from types import SimpleNamespace
from typing import Any

import torch
from omegaconf import OmegaConf
from sglang.srt.weight_sync.utils import update_weights
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM
from verl.workers.rollout.sglang_rollout import sglang_rollout as verls

from sglang_fp8rl import fetch_plan
from sglang_fp8rl.trainer import quantize_for_refit
from sglang_fp8rl.verl_rollout.adapter import ServerAdapter, prepare_rank

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


def broken(weights: Iterator[Any], command: dict[str, Any]) -> Iterator[Any]:
    """What one rank meets while it goes through its weights, without a gather in between."""
    for number, weight in enumerate(list(weights)):
        if number == 3 and torch.distributed.get_rank() == command.get("raises_on"):
            raise MemoryError("no memory for the fourth tensor")
        if number == 3 and torch.distributed.get_rank() == command.get("ends_on"):
            return
        yield weight


def asked_for(weights: Iterator[Any], command: dict[str, Any]) -> Any:
    """What the trainer hands over of its weights, and how."""
    suffix = command.get("suffix", "")
    weights = ((name + suffix, tensor) for name, tensor in weights)
    if "leaves_out" in command:
        weights = (one for one in weights if one[0] != command["leaves_out"])
    if command.get("is_empty"):
        weights = iter(())
    if command.get("is_broken"):
        weights = broken(weights, command)
    if command.get("is_quantized"):
        plan = fetch_plan(f"http://127.0.0.1:{command['port']}")
        weights = quantize_for_refit(weights, plan)
    if command.get("as_flushes"):
        weights = (([one], False) for one in weights)
    return list(weights) if "times" in command else weights


class Adapter(ServerAdapter):
    """This package's adapter, its server given instead of looked up."""

    def __init__(self, engine: Any, mesh: Any, bucket_bytes: int, command: Any = {}) -> None:  # noqa: B006
        self.fails = command.get("fails", {}) if engine is not None else {}
        self._engine, self.device_mesh, self._pd_role = engine, mesh, None
        model_type = command.get("model_type", "qwen3")
        external_lib = command.get("external_lib")
        self.model_config = SimpleNamespace(
            hf_config=SimpleNamespace(model_type=model_type), external_lib=external_lib
        )
        self.bucket_bytes = bucket_bytes
        megabytes = -(-bucket_bytes >> 20)  # what veRL's own way of sending reads
        self.config: Any = OmegaConf.create(
            {
                "checkpoint_engine": {"update_weights_bucket_megabytes": megabytes},
                "custom": command.get("custom"),
            }
        )
        set_steps = SimpleNamespace(remote=self._actor_sets_steps)
        self.server_actor = SimpleNamespace(set_global_steps=set_steps)

    async def _init_server_adapter(self) -> None:
        if "look-up" in self.fails:
            raise ValueError("Failed to look up actor 'sglang_server_0_0'")

    async def _actor_sets_steps(self, *_: Any) -> None:
        if "steps" in self.fails:
            raise RuntimeError("the actor died")

    @property
    def _bucket_bytes(self) -> int:
        return self.bucket_bytes


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
        engine = verls.AsyncHttpServerAdapter(
            model_path=command["path"],
            host="127.0.0.1",
            port=command["port"],
            launch_server=False,
            trust_remote_code=False,
        )
    model = sharded_model(command["path"], getattr(torch, command["dtype"]))
    weights = asked_for(full_tensors(model), command)
    if command.get("by_adapter"):
        if has_server:
            step = command.get("step", 1)
            of_verl = ("wire_format", "peft_config", "base_sync_done")
            wire = {key: command[key] for key in of_verl if key in command}
            os.environ["SGLANG_FP8RL_SERVED_PLAN"] = command.get("plan_file", "")
            adapter = Adapter(engine, mesh, command["bucket_bytes"], command)
            is_verls = wire or "as_flushes" in command or "model_type" in command
            for _ in range(command.get("times", 1)):
                given = weights if is_verls else in_one_memory(weights)
                await adapter.update_weights(given, step, **wire)
        else:
            list(weights)
        return []
    answers = []
    async for bucket in verls.get_named_tensor_buckets(weights, command["bucket_bytes"]):
        if has_server:
            answer = await update_weights(
                engine=engine,
                params_batch=bucket,
                device_mesh_key="infer_tp",
                device_mesh=mesh,
            )
            answers.append(answer)
    if is_leader:
        answers.append(await engine.flush_cache())
    return answers


def in_one_memory(weights: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, torch.Tensor]]:
    """Each where the one before was, as of a trainer that gathers into a buffer of its own."""
    memory = torch.empty(1 << 24, dtype=torch.uint8)
    for name, tensor in weights:
        place = memory[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        yield name, place.copy_(tensor)
        memory.fill_(0x7F)  # a NaN in FP8


def main() -> None:
    prepare_rank()
    torch.distributed.init_process_group("gloo")
    for line in sys.stdin:
        try:
            answer: dict[str, Any] = {"answers": asyncio.run(refit(json.loads(line)))}
        except Exception as error:  # noqa: BLE001  # told to the test, which may expect it
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
