"""The recipes of docs/recipes against a server, and the requests of trainers that the registry does not have."""

from __future__ import annotations

import json
import logging
import runpy
import sys
from pathlib import Path

import http_refit
import pytest
import torch
from support.engine.models import checkpoint
from support.paths import SUPPORT
from support.server.distributed_trainer import GROUP, DistributedTrainer
from support.server.served import (
    HAS_SESSIONS,
    MODEL,
    NEW_TOKENS,
    PROMPTS,
    first_weights_afterwards,
    run_script,
    weights,
)

from sglang_fp8rl.lab.testing.server import cpu_env

pytestmark = [pytest.mark.engine, pytest.mark.timeout(1200), pytest.mark.xdist_group("server")]

RECIPES = Path(__file__).parents[2] / "docs" / "recipes"
HALF = len(MODEL.first) // 2


def run(recipe: str, *args: object, **more):
    return run_script([str(RECIPES / recipe), *map(str, args)], **more)


@pytest.fixture
def main(monkeypatch):
    """`main(recipe, *args)` runs it here as a program; what it says where it fails, else None."""

    def main(recipe: str, *args: object) -> str | None:
        monkeypatch.setattr(sys, "argv", [recipe, *map(str, args)])
        try:
            runpy.run_path(str(RECIPES / recipe), run_name="__main__")
        except SystemExit as ended:
            return str(ended)
        return None

    return main


def test_plain_http_leaves_a_fresh_server(case, checkpoint_dir, main):
    done = run("http_refit.py", case.server.url, checkpoint(checkpoint_dir, MODEL, "second"))
    assert done.stdout == "sent in 1 buckets\n", done.stderr
    case.check("second")
    assert (
        main("http_refit.py", case.server.url, checkpoint(checkpoint_dir, MODEL, "first")) is None
    )
    case.check("first")


def test_plain_http_without_sessions_in_small_buckets(case, monkeypatch):
    def post(url: str, path: str, **body: object) -> bool:
        return "_weight_update" not in path and send(url, path, **body)

    send = http_refit.post
    monkeypatch.setattr(http_refit, "post", post)
    for which in ("second", "first"):
        assert http_refit.refit(case.server.url, weights(which), 100_000) > HALF
        case.check(which)


def test_plain_http_tells_a_refusal_in_the_server_s_words_and_may_be_tried_again(
    case, checkpoint_dir, tmp_path, main
):
    from safetensors.torch import save_file

    save_file({"model.no_such.weight": torch.ones(4)}, tmp_path / "model.safetensors")
    assert "model.no_such.weight" in main("http_refit.py", case.server.url, tmp_path)
    assert (
        main("http_refit.py", case.server.url, checkpoint(checkpoint_dir, MODEL, "first")) is None
    )
    case.check("first")
    for url in ("http://127.0.0.1:9", "no-scheme"):
        assert main("http_refit.py", url, tmp_path).startswith(f"error: no server answers at {url}")


@pytest.mark.parametrize("trainer", ["slime", "miles"])
def test_the_requests_of_slime_and_of_miles_leave_a_fresh_server(case, trainer):
    """As both send from colocated ranks, BF16: slime opens no session, miles (its main branch) does."""
    if trainer == "miles" and not HAS_SESSIONS:
        pytest.skip("miles' main branch asks for sessions, which this SGLang does not have")
    from sglang.srt.utils import MultiprocessingSerializer
    from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorBucket

    selector = {"selector": "all"} if trainer == "miles" else {}
    for version, which in enumerate(("second", "first"), 1):
        case.server.post("/pause_generation", {"mode": "retract"} if selector else {})
        case.server.post("/flush_cache", {})
        if selector:
            case.server.post("/begin_weight_update", selector)
        tensors = weights(which, torch.bfloat16)
        for bucket in (tensors[:HALF], tensors[HALF:]):
            flat = FlattenedTensorBucket(named_tensors=bucket)
            content = {"flattened_tensor": flat.get_flattened_tensor()}
            content["metadata"] = flat.get_metadata()
            body = {
                "serialized_named_tensors": [MultiprocessingSerializer.serialize(content, True)],
                "load_format": "flattened_bucket",
                "flush_cache": False,
                "weight_version": str(version),
            }
            status, answer = case.post("/update_weights_from_tensor", body | selector)
            assert (status, answer["success"]) == (200, True), answer
        if selector:
            case.server.post("/end_weight_update", {})
        case.server.post("/continue_generation", {})
        case.check(which)
        assert case.client.generate(PROMPTS[0])["meta_info"]["weight_version"] == str(version)


@pytest.fixture
def loggers_stay(monkeypatch):
    """AReaL replaces the root of all loggers, and their manager, when it is imported."""
    for name in ("root", "manager"):
        monkeypatch.setattr(logging.Logger, name, getattr(logging.Logger, name))


def test_areal_s_requests_by_its_recipe_leave_a_fresh_server(case, checkpoint_dir, loggers_stay):
    """From disk, by a program that the recipe becomes; and by the broadcast that AReaL's own builder announces."""
    pytest.importorskip("areal", reason="AReaL is not installed")
    from areal.api.io_struct import ParamSpec, WeightUpdateMeta
    from areal.engine.sglang_remote import SGLangBackend

    program = [sys.executable, SUPPORT / "server/areal_client.py", case.server.url]
    program += [checkpoint(checkpoint_dir, MODEL, "second"), json.dumps(PROMPTS[0]), NEW_TOKENS]
    address = case.server.url.removeprefix("http://")
    done = run("areal_fp8.py", address, "--", *program, env=cpu_env())
    assert done.returncode == 0, done.stderr[-4000:]
    answer = case.client.generate(PROMPTS[0])["meta_info"]["output_token_logprobs"]
    logprobs, tokens, _ = map(list, zip(*answer, strict=True))
    assert json.loads(done.stdout.splitlines()[-1]) == [tokens, logprobs]
    case.check("second")
    backend, meta = SGLangBackend(), WeightUpdateMeta(type="xccl", nccl_group_name="as-here")
    with DistributedTrainer(case) as trainer:
        case.server.post(backend.get_pause_request().endpoint, {})
        tensors = weights("first", torch.bfloat16)
        for bucket in (tensors[:HALF], tensors[HALF:]):
            specs = [ParamSpec(name, tuple(one.shape), "bfloat16") for name, one in bucket]
            (request,) = backend.build_distributed_weight_update_requests(meta, specs).requests
            group = {"group_name": GROUP}
            status, answer = trainer.send(bucket, **request.payload | group)
            assert (status, answer["success"]) == (200, True), answer
        case.server.post(backend.get_resume_request().endpoint, {})
    case.check("first")


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
