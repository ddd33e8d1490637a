"""With FP8 queries and probabilities, as FA3 has them, the fold is a scale around attention all the same."""

from __future__ import annotations

import pytest
from kv_cache.cpu_attention import ON
from support.engine.engine_host import EngineHost
from support.engine.generation import generate
from support.engine.kv_commands import FP8_CACHE, exponents, scale_around_attention, stored_rows
from support.engine.models import MODELS, checkpoint
from support.engine.options import overridden

pytestmark = [pytest.mark.engine, pytest.mark.xdist_group("engine qwen3")]

UNIT = (*FP8_CACHE, *overridden(kv_scales="unit"))
PROMPT = list(range(40, 60))


def test_the_fold_is_a_scale_around_fp8_attention_in_words_and_in_stored_rows(checkpoint_dir):
    path = checkpoint(checkpoint_dir, MODELS["qwen3"], "first")
    with EngineHost(path, args=FP8_CACHE) as plain:
        without = plain.call(generate, PROMPT, 4)
    with EngineHost(path, args=FP8_CACHE, env=ON) as folded:
        powers = folded.call(exponents)
        said, rows = folded.call(generate, PROMPT, 4), folded.call(stored_rows)
    assert any(a and b for a, b in powers)
    assert said != without
    with EngineHost(path, args=UNIT, env=ON) as reference:
        reference.call(scale_around_attention, powers)
        assert reference.call(generate, PROMPT, 4) == said
        assert reference.call(stored_rows) == rows


def test_a_bf16_cache_is_read_as_ever(checkpoint_dir):
    path = checkpoint(checkpoint_dir, MODELS["qwen3"], "first")
    said = []
    for env in ({}, ON):
        with EngineHost(path, env=env) as host:
            said.append(host.call(generate, PROMPT, 4))
    assert said[0] == said[1]
