"""A handle of CUDA memory names its GPU by UUID, so sender and server may number GPUs differently."""

from __future__ import annotations

import inspect
import os
import pickle
from types import SimpleNamespace

import pytest
import torch
from torch.multiprocessing import reductions

from sglang_fp8rl.wire.handles import DEVICE, HandlePickler

patch_torch = pytest.importorskip("sglang.srt.utils.patch_torch")

TRAINER, SERVER = ("uuid-b",), ("uuid-a", "uuid-b")  # GPUs that each process sees, in its own order


def sees(monkeypatch, uuids):
    properties = lambda at: SimpleNamespace(uuid=uuids[at])  # noqa: E731
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(uuids))
    monkeypatch.setattr(torch.cuda, "get_device_properties", properties)


class OnGpu(torch.Tensor):
    """What says that it lies on a GPU."""

    is_cuda = True


def handle(monkeypatch, number):
    """As `HandlePickler` makes it, of what torch made of a tensor on the GPU of that number."""
    names = inspect.signature(reductions.rebuild_cuda_tensor).parameters
    arguments = {name: name for name in names} | {"storage_device": number}
    reduced = reductions.rebuild_cuda_tensor, tuple(arguments.values())
    monkeypatch.setattr(reductions, "reduce_tensor", lambda tensor: reduced)
    return HandlePickler.reducer_override(None, torch.ones(2).as_subclass(OnGpu)), reduced


def test_the_number_is_where_torch_has_it():
    parameters = list(inspect.signature(reductions.rebuild_cuda_tensor).parameters)
    assert parameters[DEVICE] == "storage_device"
    assert DEVICE == patch_torch._REDUCE_TENSOR_ARG_DEVICE_INDEX
    # `_share_cuda_` gives it first, and `reduce_tensor` hands it on.
    assert "device,\n            handle," in inspect.getsource(reductions.reduce_tensor)


def test_the_trainer_s_number_becomes_the_server_s(monkeypatch):
    sees(monkeypatch, TRAINER)
    (rebuild, arguments), _ = handle(monkeypatch, 0)
    assert rebuild is reductions.rebuild_cuda_tensor
    assert arguments[DEVICE] == "uuid-b"
    opened = []
    sees(monkeypatch, SERVER)
    monkeypatch.setattr(
        reductions, "_rebuild_cuda_tensor_original", lambda *a: opened.append(a), raising=False
    )
    patch_torch._rebuild_cuda_tensor_modified(*arguments)
    (opened,) = opened
    assert opened[DEVICE] == 1
    assert [one for at, one in enumerate(opened) if at != DEVICE] == [
        one for at, one in enumerate(arguments) if at != DEVICE
    ]


def test_a_handle_that_sglang_s_own_patch_made_stays_as_it_is(monkeypatch):
    made, reduced = handle(monkeypatch, "uuid-b")
    assert made == reduced


def test_only_cuda_tensors_are_pickled_otherwise():
    data = pickle.dumps(1)
    assert pickle.loads(data) == 1
    assert HandlePickler.reducer_override(None, torch.ones(2)) is NotImplemented
    assert HandlePickler.reducer_override(None, "a") is NotImplemented


@pytest.mark.gpu
def test_a_process_that_numbers_the_gpus_otherwise_reads_the_same_memory(tmp_path):
    """`CUDA_VISIBLE_DEVICES` by UUID, which on one GPU is the same number; on two, the other one."""
    import base64
    import subprocess
    import sys

    from sglang_fp8rl.wire.handles import serialize

    last = torch.cuda.device_count() - 1
    tensor = torch.arange(1000, device=f"cuda:{last}")
    text, uuid = serialize(tensor), str(torch.cuda.get_device_properties(last).uuid)
    assert uuid.encode() in base64.b64decode(text)
    code = (
        "import sys, base64, pickle, torch\n"
        "from sglang.srt.utils.patch_torch import monkey_patch_torch_reductions\n"
        "monkey_patch_torch_reductions()\n"
        "one = pickle.loads(base64.b64decode(sys.stdin.read()))\n"
        "print(one.device.index, int(one.sum()))\n"
    )
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": f"GPU-{uuid}"}
    said = subprocess.run(
        [sys.executable, "-c", code],
        input=text,
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert said.stdout.split() == ["0", str(999 * 500)]
