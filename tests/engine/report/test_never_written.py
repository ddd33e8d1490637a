"""What the checkpoint of the start did not have is not whole, and named, until an update brings it."""

from __future__ import annotations

import pytest
from support.engine.commands import status
from support.engine.engine_host import EngineHost
from support.engine.models import MODELS
from support.engine.pool import runs_on

from sglang_fp8rl.lab.testing.checkpoints import save_checkpoint

pytestmark = [pytest.mark.engine, runs_on("qwen2-bias")]

MODEL = MODELS["qwen2-bias"]
ABSENT = {
    "model.norm.weight": "model.norm.weight",
    "lm_head.weight": "lm_head.weight",
    "model.layers.0.mlp.up_proj.weight": "model.layers.0.mlp.gate_up_proj.weight",
}
WHOLE = {name: ABSENT[name] for name in ("model.norm.weight", "lm_head.weight")}


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    path = tmp_path_factory.mktemp("without") / "first"
    absent = {*ABSENT, *BIASES}
    had = {name: weight for name, weight in MODEL.first.items() if name not in absent}
    save_checkpoint(path, MODEL.config, had)
    return path


# SGLang fills biases with zeros, which is what a model without them has.
BIASES = [name for name in MODEL.first if name.endswith(".bias") and ".layers.1." in name]


def check_lacks(host, parameters):
    found = host.call(status)
    assert (found["state"] == "whole") is (found["consistent"]) is (not parameters)
    told = " ".join(text for text in found["problems"] if "come" in text or "left out" in text)
    assert [one for one in parameters if one not in told] == [], found["problems"]


# A probe of names, where nothing is loaded, does not tell which part of a parameter has no name.
@pytest.mark.parametrize(
    ("args", "absent"),
    [((), ABSENT), (("--load-format", "dummy"), WHOLE)],
    ids=["loaded", "dummy"],
)
def test_the_weights_are_not_whole_until_a_write_reaches_them(path, args, absent):
    second = dict(MODEL.second)
    rest = [item for item in second.items() if item[0] not in {*absent, *BIASES}]
    if args:
        rest += [(name, second[name]) for name in BIASES]
    with EngineHost(path, args=args) as host:
        if not args:
            check_lacks(host, absent.values())
        for _ in range(2):  # natively, then replayed
            host.send(rest)
            check_lacks(host, absent.values())
            host.call(flush_cache)
        for name in absent:
            host.send([*rest, (name, second[name])])
            check_lacks(host, [absent[other] for other in absent if other != name])
            host.call(flush_cache)
        whole = [*rest, *((name, second[name]) for name in absent)]
        for items in (whole, whole, list(second.items())):
            host.send(items)
            check_lacks(host, [])
        # A bias that was sent once is one.
        no_bias = [item for item in second.items() if item[0] not in BIASES]
        host.send(no_bias)
        check_lacks(host, ["model.layers.1.self_attn.qkv_proj.bias"])
        host.send(rest)
        check_lacks(host, absent.values())


def flush_cache(scheduler):
    return scheduler.flush_cache()
