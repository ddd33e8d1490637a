"""A draft model that shares the target's embedding and head (SGLang's MiMo MTP): updates reach both, as a fresh start's
loads do, and what of it was lost with its memory is missing until it came.

SGLang's own update path and draft model; only the worker that would speculate is not there, which needs a GPU.
"""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from support.engine.commands import (
    begin,
    digests,
    end,
    model_of,
    release_and_resume,
    status,
)
from support.engine.drafts import build_draft, check_same, draft_values
from support.engine.engine_host import EngineHost
from support.engine.models import Model
from support.engine.pool import runs_on

from sglang_fp8rl.lab.testing.checkpoints import perturbed, save_checkpoint
from sglang_fp8rl.versions import HAS_SESSIONS
from sglang_fp8rl.wire.refit_note import RefitNote

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(
        not HAS_SESSIONS,
        reason="its update path asks the speculating worker itself",
    ),
]

MIMO = Model("mimo-mtp", "qwen2", (("num_nextn_predict_layers", 1),))
EMBEDDING = "model.embed_tokens.weight"


def state(which: str) -> dict[str, torch.Tensor]:
    """Of target and draft, as MiMo's checkpoints have them."""
    target = getattr(MIMO, which)
    hidden = MIMO.config.hidden_size
    layer = {
        name.replace("layers.1.", "mtp_layers.0."): weight
        for name, weight in MIMO.first.items()
        if ".layers.1." in name
    }
    norms = ("token_layernorm", "hidden_layernorm", "final_layernorm")
    layer |= {f"model.mtp_layers.0.{norm}.weight": torch.ones(hidden) for norm in norms}
    layer["model.mtp_layers.0.input_proj.weight"] = 0.05 * torch.ones(hidden, 2 * hidden)
    return {**target, **perturbed(layer, {"first": 3, "second": 4}[which])}


def start_draft(scheduler):
    """SGLang's own draft model and what its worker does with it: it shares embedding and head, and is updated."""
    draft = build_draft(scheduler)
    draft.set_embed_and_head(*model_of(scheduler).get_embed_and_head())
    target = scheduler.tp_worker.model_runner.weight_updater
    runner = SimpleNamespace(weight_updater=replace(target, get_model=lambda: draft))
    scheduler.weight_updater.draft_worker = SimpleNamespace(
        weight_update_runners=lambda: [("draft", runner)]
    )
    return type(draft).__name__


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    directory = tmp_path_factory.mktemp("mimo")
    found = {which: directory / which for which in ("first", "second")}
    for which, path in found.items():
        save_checkpoint(path, MIMO.config, state(which))
        config = json.loads((path / "config.json").read_text())
        config["architectures"] = ["MiMoForCausalLM"]  # of Qwen2's fields
        (path / "config.json").write_text(json.dumps(config))
    return found


@pytest.fixture(scope="module")
def fresh(paths):
    with EngineHost(paths["second"]) as host:
        host.call(start_draft)
        return host.call(digests), host.call(draft_values)


@pytest.fixture
def host(paths):
    with EngineHost(paths["first"]) as host:
        assert host.call(start_draft) == "MiMoMTP"
        yield host


def buckets(items, count=3):
    return [items[at::count] for at in range(count)]


@runs_on("mimo-mtp")
@pytest.mark.parametrize("load_format", [None, "flattened_bucket"])
def test_updates_reach_target_and_draft_as_a_fresh_start_does(host, fresh, load_format):
    for which in ("second", "first", "second"):
        for bucket in buckets(list(state(which).items())):
            host.send(bucket, load_format)
        assert host.call(status)["state"] == "whole", host.call(status)["problems"]
    assert host.call(status)["replay"]["calls"] > 0
    assert host.call(digests) == fresh[0]
    check_same(host.call(draft_values), fresh[1])


@runs_on("mimo-mtp")
def test_a_draft_s_embedding_is_the_target_s_and_another_one_is_refused(host):
    served, other = state("first")[EMBEDDING], state("second")[EMBEDDING]
    host.send([(EMBEDDING, served)], selector="draft")
    assert host.call(status)["state"] == "whole"
    host.refuses_and_keeps([(EMBEDDING, other)], EMBEDDING, "draft", selector="draft")
    # In one session the target's may come behind it.
    assert host.call(begin)[0]
    host.send([(EMBEDDING, other)], selector="draft")
    host.send(list(state("second").items()), selector="target")
    ok, message = host.call(end)
    assert ok, message
    assert host.call(status)["state"] == "whole"
    # And another refit of the target alone is not held against it.
    host.send(list(state("first").items()), selector="target")
    assert host.call(status)["state"] == "whole"


@runs_on("mimo-mtp")
def test_a_draft_whose_memory_was_released_is_missing_until_it_came(host):
    items = list(state("first").items())
    host.call(release_and_resume, ["weights"], True)
    host.send(items, selector="target")
    found = host.call(status)
    assert found["state"] == "unloaded"
    assert "draft" in found["problems"][0]
    assert "model.input_proj.weight" in found["problems"][0]
    half = [item for item in items if "k_proj" not in item[0]]
    host.send(half, selector="draft")
    assert host.call(status)["state"] == "unloaded"
    host.send(items, selector="draft")
    assert host.call(status)["state"] == "whole", host.call(status)["problems"]


@runs_on("mimo-mtp")
def test_a_session_for_the_draft_alone_ends_well(host):
    draft = [(name, one) for name, one in state("second").items() if "mtp_layers" in name]
    note = RefitNote("draft", extent="partial").to_text()
    assert host.call(begin, rid=note, selector="draft")[0]
    host.send(draft, selector="draft")
    assert host.call(end) == (True, "Success")
    assert host.call(status)["state"] == "whole"
