"""Functions that tests run inside a scheduler (see `engine_host`)."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from sglang_fp8rl.wire.refit_note import with_version
from support.replayed import replay_of

T = TypeVar("T")


def model_of(scheduler: Any) -> Any:
    return scheduler.tp_worker.model_runner.model


def served_tensors(scheduler: Any) -> dict[str, torch.Tensor]:
    """Parameters, buffers, and tensors that are plain attributes of a module (derived weights)."""
    found: dict[str, torch.Tensor] = {}
    for prefix, module in model_of(scheduler).named_modules():
        for name, value in (*vars(module).items(), *module._buffers.items()):
            if isinstance(value, torch.Tensor):
                found[f"{prefix}.{name}"] = value
    return found | {name: p.data for name, p in model_of(scheduler).named_parameters()}


def digests(scheduler: Any) -> dict[str, str]:
    """Name of a parameter or derived tensor to a hash of its bytes."""
    return {
        name: hashlib.sha256(
            tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data
        ).hexdigest()
        for name, tensor in served_tensors(scheduler).items()
    }


def scribble(scheduler: Any) -> None:
    """Spoil every weight, derived ones too, as memory that was released and resumed is."""
    buffers = {id(tensor) for tensor in model_of(scheduler).buffers()}
    for tensor in served_tensors(scheduler).values():
        if id(tensor) not in buffers:
            tensor.detach().fill_(3)


def addresses(scheduler: Any) -> dict[str, int]:
    return {name: tensor.data_ptr() for name, tensor in served_tensors(scheduler).items()}


def parameter(scheduler: Any, name: str) -> torch.Tensor:
    """A copy of one parameter; FP8 as uint8."""
    data = dict(model_of(scheduler).named_parameters())[name].data
    return (data.view(torch.uint8) if data.element_size() == 1 else data).clone()


def update(
    scheduler: Any,
    named_tensors: list[tuple[str, torch.Tensor]],
    load_format: str | None = None,
    flush_cache: bool = True,
    **more: Any,
) -> tuple[bool, str]:
    """`update_weights_from_tensor` as the request handler calls it; `more` are fields of the request."""
    from sglang.srt.utils import MultiprocessingSerializer

    payload: Any = named_tensors
    if load_format == "flattened_bucket":
        from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorBucket

        bucket = FlattenedTensorBucket(named_tensors=named_tensors)
        payload = {
            "flattened_tensor": bucket.get_flattened_tensor(),
            "metadata": bucket.get_metadata(),
        }
    one = serialized(payload, MultiprocessingSerializer.serialize)
    return send(scheduler, to_all_ranks(scheduler, one), load_format, flush_cache, **more)


def to_all_ranks(scheduler: Any, one: Any) -> list[Any]:
    """The payloads of a request that brings every rank the same."""
    return [one] * torch.distributed.get_world_size(scheduler.weight_updater.tp_cpu_group)


def serialized(value: Any, serialize: Callable[[Any], T]) -> T:
    """`serialize(value)`; again where torch's manager of shared memory, which has a second, did not answer."""
    for _ in range(30):
        try:
            return serialize(value)
        except RuntimeError as error:
            if "manager connection has timed out" not in str(error):
                raise
    return serialize(value)


def send(
    scheduler: Any,
    payload: list[Any],
    load_format: str | None = None,
    flush_cache: bool = True,
    **more: Any,
) -> tuple[bool, str]:
    """As `update`, with a payload of the caller's making."""
    from sglang.srt.managers.io_struct import UpdateWeightsFromTensorReqInput

    request = UpdateWeightsFromTensorReqInput(
        serialized_named_tensors=payload, load_format=load_format, flush_cache=flush_cache, **more
    )
    return _answered(scheduler.weight_updater.update_weights_from_tensor(request))


def _answered(result: Any) -> tuple[bool, str]:
    """What an answer says, but that no version moved: SGLang's tokenizer manager takes that away."""
    return result.success, result.message.removesuffix(with_version("", None))


def begin(scheduler: Any, **fields: Any) -> tuple[bool, str]:
    from sglang.srt.managers.io_struct import BeginWeightUpdateReqInput

    result = scheduler.weight_updater.begin_weight_update(BeginWeightUpdateReqInput(**fields))
    return result.success, result.message


def end(scheduler: Any) -> tuple[bool, str]:
    from sglang.srt.managers.io_struct import EndWeightUpdateReqInput

    return _answered(scheduler.weight_updater.end_weight_update(EndWeightUpdateReqInput()))


def update_from_disk(scheduler: Any, path: str, load_format: str = "auto") -> tuple[bool, str]:
    from sglang.srt.managers.io_struct import UpdateWeightFromDiskReqInput

    request = UpdateWeightFromDiskReqInput(model_path=path, load_format=load_format)
    return _answered(scheduler.weight_updater.update_weights_from_disk(request))


def release_and_resume(
    scheduler: Any,
    tags: list[str] | list[list[str]] | None,
    is_paged: bool,
    resumed: Callable[[Any], None] | None = None,
) -> None:
    """The weights' memory as a memory saver takes it and gives it back.

    Pages are CUDA's, so bytes stay, unless `resumed(scheduler)` spoils them at that moment. Lists of tags are
    resumed one after the other.
    """
    from sglang.srt.managers.io_struct import (
        ReleaseMemoryOccupationReqInput,
        ResumeMemoryOccupationReqInput,
    )
    from sglang.srt.utils.torch_memory_saver_adapter import _TorchMemorySaverAdapterNoop

    class Paging(_TorchMemorySaverAdapterNoop):
        enabled = True

        def resume(self, tag: str) -> None:
            if resumed is not None and tag == "weights":
                resumed(scheduler)

    updater = scheduler.weight_updater
    adapter = updater.memory_saver_adapter
    steps = tags if tags and isinstance(tags[0], list) else [tags]
    if is_paged:
        updater.memory_saver_adapter = Paging()
    try:
        for step in steps:
            updater.release_memory_occupation(ReleaseMemoryOccupationReqInput(tags=step))
        for step in steps:
            updater.resume_memory_occupation(ResumeMemoryOccupationReqInput(tags=step))
    finally:
        updater.memory_saver_adapter = adapter


def status(scheduler: Any) -> dict[str, Any]:
    """The section `fp8rl` of `GET /server_info`."""
    from sglang.srt.managers.io_struct import GetInternalStateReq

    return scheduler.get_internal_state(GetInternalStateReq()).internal_state["fp8rl"]


def plan_document(scheduler: Any) -> dict[str, Any]:
    """What `GET /fp8rl/plan` answers."""
    from sglang_fp8rl.engine.plan.extension import Plan

    return Plan(model_of(scheduler).fp8rl_refit).made.as_dict()


def stored(scheduler: Any) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Parameter name to dtype and shape."""
    return {
        name: (str(parameter.dtype).removeprefix("torch."), tuple(parameter.shape))
        for name, parameter in model_of(scheduler).named_parameters()
    }


def set_longest_row(_: Any, columns: int) -> int:
    """Kernels take rows of at most so many columns from now on; how many they took."""
    from sglang_fp8rl.numerics import write_table

    before, write_table.LONGEST_ROW = write_table.LONGEST_ROW, columns
    return before


def forget_buckets(scheduler: Any) -> None:
    """As if no bucket had been sent yet: nothing to replay, counts of zero."""
    replay = replay_of(model_of(scheduler).fp8rl_refit)
    if replay is not None:
        replay.__init__(replay.refit)
