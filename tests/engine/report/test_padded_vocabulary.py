"""Rows that SGLang adds to a vocabulary are in no checkpoint, and nothing old about them."""

import pytest
from support.engine.commands import digests, status
from support.engine.engine_host import EngineHost
from support.engine.models import Model, checkpoint

pytestmark = pytest.mark.engine

# SGLang pads to 64 rows, and on two ranks to 128. Of the ten, the second rank has padding only.
SIZES = (261, 10)


def model(size: int) -> Model:
    return Model(f"qwen3-vocabulary-{size}", "qwen3", (("vocab_size", size),))


@pytest.mark.parametrize("tp_size", [1, 2])
@pytest.mark.parametrize("load_format", ["dummy", pytest.param("auto", marks=pytest.mark.slow)])
@pytest.mark.parametrize("size", [SIZES[0], pytest.param(SIZES[1], marks=pytest.mark.slow)])
def test_the_first_full_update_leaves_nothing_old(checkpoint_dir, size, load_format, tp_size):
    case = model(size)
    path = checkpoint(checkpoint_dir, case, "first")
    with EngineHost(path, tp_size=tp_size, args=("--load-format", load_format)) as host:
        fresh = host.call_all(digests)
        for state in host.call_all(status):
            assert state["consistent"] == (load_format == "auto"), state["problems"]
        for _ in range(2):  # natively, then replayed
            host.send(list(case.first.items()))
            for state in host.call_all(status):
                assert state["consistent"], state["problems"]
                assert state["last_refit"]["complete"]
        if load_format == "auto":
            assert host.call_all(digests) == fresh
