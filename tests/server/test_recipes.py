"""The recipes of docs/recipes against a server, and the requests of trainers that the registry does not have."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import http_refit
import pytest
import torch
from _distributed_trainer import DistributedTrainer
from _served import (
    HAS_SESSIONS,
    MODEL,
    NEW_TOKENS,
    PROMPTS,
    first_weights_afterwards,
    run_script,
    weights,
)
from models import checkpoint
from test_other_clients import flush, post, serialized

from sglang_fp8rl.lab.testing.server import cpu_env

pytestmark = [pytest.mark.engine, pytest.mark.timeout(1200), pytest.mark.xdist_group("server")]

RECIPES = Path(__file__).parents[2] / "docs" / "recipes"
HALF = len(MODEL.first) // 2


def run(recipe: str, *args: object, **more) -> str:
    done = run_script([str(RECIPES / recipe), *map(str, args)], **more)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


def test_plain_http_leaves_a_fresh_server(case, checkpoint_dir):
    for which in ("second", "first"):
        path = checkpoint(checkpoint_dir, MODEL, which)
        assert "sent in 1 buckets" in run("http_refit.py", case.server.url, path)
        case.check(which)


def test_plain_http_without_sessions_in_small_buckets(case, monkeypatch):
    send = http_refit.post
    monkeypatch.setattr(
        http_refit,
        "post",
        lambda url, path, **body: "_weight_update" not in path and send(url, path, **body),
    )
    for which in ("second", "first"):
        assert http_refit.refit(case.server.url, weights(which), 100_000) > HALF
        case.check(which)


def test_plain_http_tells_a_refusal_in_the_server_s_words(case, tmp_path):
    from safetensors.torch import save_file

    with first_weights_afterwards(case):
        save_file({"model.no_such.weight": torch.ones(4)}, tmp_path / "model.safetensors")
        done = run_script([str(RECIPES / "http_refit.py"), case.server.url, str(tmp_path)])
        assert done.returncode == 1
        assert "model.no_such.weight" in done.stderr.splitlines()[-1]
    done = run_script([str(RECIPES / "http_refit.py"), "http://127.0.0.1:9", str(tmp_path)])
    assert "no server answers" in done.stderr.splitlines()[-1]


def flattened(tensors) -> dict:
    from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorBucket

    flat = FlattenedTensorBucket(named_tensors=tensors)
    content = {"flattened_tensor": flat.get_flattened_tensor(), "metadata": flat.get_metadata()}
    return {"serialized_named_tensors": [serialized(content)], "load_format": "flattened_bucket"}


@pytest.mark.parametrize("trainer", ["slime", "miles"])
def test_the_requests_of_slime_and_of_miles_leave_a_fresh_server(case, trainer):
    """As both send from colocated ranks, BF16: slime opens no session, miles (its main branch) does."""
    if trainer == "miles" and not HAS_SESSIONS:
        pytest.skip("miles' main branch asks for sessions, which this SGLang does not have")
    session = {"selector": "all"} if trainer == "miles" else {}
    for version, which in enumerate(("second", "first"), 1):
        post(case, "/pause_generation", mode="retract")
        flush(case)
        if session:
            post(case, "/begin_weight_update", **session)
        tensors = weights(which, torch.bfloat16)
        for bucket in (tensors[:HALF], tensors[HALF:]):
            body = flattened(bucket) | session | {"weight_version": str(version)}
            post(case, "/update_weights_from_tensor", **body, flush_cache=False)
        if session:
            post(case, "/end_weight_update")
        post(case, "/continue_generation")
        case.check(which)
        assert case.client.generate(PROMPTS[0])["meta_info"]["weight_version"] == str(version)


def test_areal_s_update_from_disk_by_its_recipe(case, checkpoint_dir):
    pytest.importorskip("areal", reason="AReaL is not installed")
    client = Path(__file__).with_name("_areal_client.py")
    address = case.server.url.removeprefix("http://")
    for which in ("second", "first"):
        path = checkpoint(checkpoint_dir, MODEL, which)
        command = [
            sys.executable,
            client,
            case.server.url,
            path,
            json.dumps(PROMPTS[0]),
            NEW_TOKENS,
        ]
        tokens, _ = json.loads(
            run("areal_fp8.py", address, "--", *command, env=cpu_env()).splitlines()[-1]
        )
        assert len(tokens) == NEW_TOKENS
        case.check(which)


def test_areal_s_broadcast_leaves_a_fresh_server(case):
    """By its own builder; its FSDP engine sends BF16, in buckets."""
    pytest.importorskip("areal", reason="AReaL is not installed")
    from areal.api.io_struct import ParamSpec, WeightUpdateMeta
    from areal.engine.sglang_remote import SGLangBackend

    backend, meta = SGLangBackend(), WeightUpdateMeta(type="xccl", nccl_group_name="named-by-areal")
    with DistributedTrainer(case) as trainer:
        for which in ("second", "first"):
            post(case, backend.get_pause_request().endpoint)
            tensors = weights(which, torch.bfloat16)
            for bucket in (tensors[:HALF], tensors[HALF:]):
                specs = [ParamSpec(name, tuple(one.shape), "bfloat16") for name, one in bucket]
                (request,) = backend.build_distributed_weight_update_requests(meta, specs).requests
                said = {**request.payload, "group_name": trainer_group()}
                assert {*said} == {"names", "dtypes", "shapes", "group_name", "abort_all_requests"}
                status, answer = trainer.send(bucket, **said)
                assert (status, answer["success"]) == (200, True), answer
            post(case, backend.get_resume_request().endpoint)
            case.check(which)


def trainer_group() -> str:
    from _distributed_trainer import GROUP

    return GROUP


def test_trl_s_callback_proves_each_step_of_a_transformers_trainer(case, tmp_path):
    from transformers import AutoModelForCausalLM, Trainer, TrainingArguments
    from trl_grpo import ServedByFp8

    model = AutoModelForCausalLM.from_config(MODEL.config).float()
    model.load_state_dict(MODEL.first, strict=False)
    rows = [{"input_ids": [1, 2, 3, 4], "labels": [1, 2, 3, 4]}] * 4
    options = {"max_steps": 2, "use_cpu": True, "report_to": [], "save_strategy": "no"}
    with first_weights_afterwards(case):
        arguments = TrainingArguments(str(tmp_path), learning_rate=1e-2, **options)
        callback = ServedByFp8(case.server.url, verify=True)
        Trainer(model, arguments, train_dataset=rows, callbacks=[callback]).train()
        assert case.client.generate(PROMPTS[0])["meta_info"]["weight_version"] == "2"
        assert case.ask() != case.expected["first"]
        case.client.verify(model.state_dict().items()).check("what is served")
