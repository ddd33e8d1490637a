"""What the checkpoint of the start did not have is not whole, and named, until an update brings it."""

from __future__ import annotations

import pytest
from commands import digests, status, update
from engine_host import EngineHost
from models import MODELS
from pool import runs_on

from sglang_fp8rl.lab.testing.checkpoints import save_checkpoint

pytestmark = [pytest.mark.engine, runs_on("qwen2-bias")]

MODEL = MODELS["qwen2-bias"]
ABSENT = {
    "norm": "model.norm.weight",
    "head": "lm_head.weight",
    "bias of a part": "model.layers.1.self_attn.k_proj.bias",
    "a part": "model.layers.0.mlp.up_proj.weight",
}
OWNERS = {
    "norm": "model.norm.weight",
    "head": "lm_head.weight",
    "bias of a part": "model.layers.1.self_attn.qkv_proj.bias",
    "a part": "model.layers.0.mlp.gate_up_proj.weight",
}


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    path = tmp_path_factory.mktemp("without") / "first"
    absent = set(ABSENT.values())
    had = {name: weight for name, weight in MODEL.first.items() if name not in absent}
    save_checkpoint(path, MODEL.config, had)
    return path


def lacking(host, *kinds):
    found = host.call(status)
    assert found["state"] != "whole"
    assert not found["consistent"]
    for kind in kinds:
        assert OWNERS[kind] in " ".join(found["problems"]), (kind, found["problems"])


@pytest.mark.parametrize("args", [(), ("--load-format", "dummy")], ids=["loaded", "dummy"])
def test_the_weights_are_not_whole_until_a_write_reaches_them(path, args):
    rest = [item for item in MODEL.second.items() if item[0] not in ABSENT.values()]
    with EngineHost(path, args=args) as host:
        if not args:
            lacking(host, *ABSENT)
        for _ in range(3):  # natively, then replayed
            assert host.call(update, rest)[0]
            lacking(host, *ABSENT)
        for kind, name in ABSENT.items():
            assert host.call(update, [*rest, (name, MODEL.second[name])])[0]
            lacking(host, *(ABSENT.keys() - {kind}))
        assert host.call(update, list(MODEL.second.items()))[0]
        assert host.call(status)["state"] == "whole", host.call(status)["problems"]
        assert host.call(update, rest)[0]
        lacking(host, *ABSENT)
        assert host.call(update, list(MODEL.second.items()))[0]
        found = host.call(digests)
    assert len(found) > len(ABSENT)
