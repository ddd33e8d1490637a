"""What only one rank refuses: the others have flushed by then, and choose no exponents without it."""

from __future__ import annotations

import pytest
from support.engine.commands import digests, status, update
from support.engine.kv_commands import exponents, generate_cached
from support.engine.pool import engine_key, on
from test_fold_laws import LONGER, drifted, with_fp8_cache

pytestmark = pytest.mark.engine


@on(
    with_fp8_cache("qwen3", "tp2"),
    slow=(engine_key("qwen3", "tp2", (), "radix", radix_cache=True),),
)
def test_where_one_rank_fails_all_ranks_flush_and_go_on_alike(host):
    host.call_all(generate_cached, LONGER, 4)
    name = "model.layers.1.self_attn.v_proj.weight"
    spoiled = drifted(host.model.second)
    spoiled[name] = spoiled[name].clone()
    spoiled[name][-1] = float("nan")  # a row of the last rank
    for taken, message in host.call_all(update, list(spoiled.items())):
        assert not taken
        assert name in message
    first, second = host.call_all(generate_cached, LONGER, 4)
    assert first == second
    assert first[1] == 0  # no hit: what the old weights computed is gone
    if host.call(status)["kv_scales"] is not None:
        first, second = host.call_all(exponents)
        assert first == second
        assert (
            first[0][1] != host.as_loaded.status[0]["kv_scales"]["layers"][0]["values"]["exponent"]
        )
    host.send(list(host.model.second.items()))
    assert host.call_all(digests) == host.fresh("second").digests
