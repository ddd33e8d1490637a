"""The calls that other projects' clients make, in their order: afterwards a server is a fresh one.

None of them opens a session, names its refit, or knows this package.
"""

from __future__ import annotations

import time
from itertools import groupby

import pytest
import torch
from support.engine.models import checkpoint
from support.server.distributed_trainer import DistributedTrainer
from support.server.served import MODEL, PROMPTS, Served, version_of, weights

from sglang_fp8rl.lab.testing.outputs import differences

pytestmark = [pytest.mark.engine, pytest.mark.timeout(1200), pytest.mark.xdist_group("server")]

NORM = "norm.weight"
HALF = len(MODEL.first) // 2


def post(case: Served, path: str, **body) -> dict:
    status, answer = case.post(path, body)
    assert status == 200, (path, answer)
    assert answer.get("success", True), (path, answer)
    return answer


def flush(case: Served) -> None:
    """As SGLang's clients do: again as long as the last request has not left the scheduler."""
    import requests

    for _ in range(100):
        answer = requests.get(case.server.url + "/flush_cache", timeout=60)
        if answer.status_code == 200:
            return
        time.sleep(0.1)
    raise AssertionError(answer.text)


def serialized(data) -> str:
    from sglang.srt.utils import MultiprocessingSerializer

    return MultiprocessingSerializer.serialize(data, output_str=True)


def mixed(which: str) -> list[tuple[str, torch.Tensor]]:
    """As a trainer with FP32 norms sends them, by name."""
    return sorted(
        (name, weight if name.endswith(NORM) else weight.bfloat16())
        for name, weight in weights(which)
    )


# -- SGLang's own tests of its updates -------------------------------------------------------------


@pytest.mark.parametrize("pause", [None, "abort", "retract"])
def test_from_disk_there_and_back_past_a_path_that_is_not_there(case, checkpoint_dir, pause):
    for which in ("second", "first"):
        path = str(checkpoint(checkpoint_dir, MODEL, which))
        if pause:
            case.server.post("/pause_generation", {"mode": pause})
        status, answer = case.post("/update_weights_from_disk", {"model_path": path + "-not-there"})
        assert (status, answer["success"]) == (400, False)
        post(case, "/update_weights_from_disk", model_path=path, weight_version=which)
        if pause:
            case.server.post("/continue_generation", {})
        case.check(which)
        assert version_of(case.client) == which


# -- an FSDP trainer: buckets, one flattened tensor for each dtype, one flush at the end -----------


def test_flattened_buckets_by_dtype_as_an_fsdp_trainer_sends_them(case):
    from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorBucket

    for version, which in enumerate(("second", "first", "second", "first"), 1):
        case.server.post("/pause_generation", {})
        flush(case)
        tensors = mixed(which)
        for bucket in (tensors[:HALF], tensors[HALF:]):
            by_dtype = sorted(bucket, key=lambda one: str(one[1].dtype))
            for _, group in groupby(by_dtype, key=lambda one: one[1].dtype):
                flat = FlattenedTensorBucket(named_tensors=list(group))
                content = {
                    "flattened_tensor": flat.get_flattened_tensor(),
                    "metadata": flat.get_metadata(),
                }
                post(
                    case,
                    "/update_weights_from_tensor",
                    serialized_named_tensors=[serialized(content)],
                    load_format="flattened_bucket",
                    flush_cache=False,
                    weight_version=str(version),
                )
        flush(case)
        case.server.post("/continue_generation", {})
        case.check(which)
    assert version_of(case.client) == "4"


def test_a_version_that_comes_with_every_bucket_moves_when_the_refit_is_whole(case, session):
    def send(part, version, *, is_refused=False):
        payload = [serialized(part)]
        body = {"serialized_named_tensors": payload, "weight_version": version}
        status, answer = case.post("/update_weights_from_tensor", {**body, "flush_cache": False})
        assert (status, answer["success"]) == ((400, False) if is_refused else (200, True)), answer

    def begin():
        if session:
            post(case, "/begin_weight_update")

    def end(*, fails=False):
        if session:
            _, answer = case.post("/end_weight_update", {})
            assert answer["success"] is not fails, answer
        flush(case)

    tensors, before = weights("second"), version_of(case.client)
    parts = tensors[:HALF], tensors[HALF:]
    begin()
    send(parts[0], "whole")
    assert version_of(case.client) == before
    send(parts[1], "whole")
    assert (version_of(case.client) == before) is session
    end()
    assert version_of(case.client) == "whole"
    begin()
    send(parts[0], "half")
    end()
    assert version_of(case.client) == "whole"
    begin()
    send([("a name that nothing takes", torch.ones(1))], "failed", is_refused=True)
    send(parts[0], "failed")
    end(fails=True)
    assert version_of(case.client) == "whole"
    begin()
    for part in (weights("first")[:HALF], weights("first")[HALF:]):
        send(part, "first")
    end()
    assert version_of(case.client) == "first"
    case.check("first")


# -- a broadcast between pause and continue --------------------------------------------------------


def test_a_broadcast_between_pause_and_continue_equals_a_fresh_server(case):
    with DistributedTrainer(case) as trainer:
        for version, which in enumerate(("second", "first", "second", "first"), 1):
            case.server.post("/pause_generation", {})
            flush(case)
            tensors = weights(which, torch.bfloat16)
            for bucket in (tensors[:HALF], tensors[HALF:]):
                status, answer = trainer.send(
                    bucket, flush_cache=False, weight_version=str(version)
                )
                assert (status, answer["success"]) == (200, True), answer
            case.server.post("/continue_generation", {})
            case.check(which)


def test_what_none_of_these_calls_sent_is_told_from_what_they_did(case):
    """Or nothing here proves anything."""
    assert len(differences(case.expected["first"], case.expected["second"])) == len(PROMPTS)
    payload = [serialized(weights("second")[:HALF])]
    post(case, "/update_weights_from_tensor", serialized_named_tensors=payload)
    assert case.client.status()["state"] == "mixed"
    assert differences(case.ask(), case.expected["first"])
    case.client.update(weights("first"))
    case.check("first")
