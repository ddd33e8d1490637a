"""A tensor with fewer bits than it is served with is stored as it came, and named; replayed buckets too."""

from __future__ import annotations

import pytest
import torch
from support.engine.commands import forget_buckets, parameter, status, update
from support.engine.models import MODELS
from support.engine.pool import on

pytestmark = [pytest.mark.engine, on("deepseek-v3-tp1")]

MODEL = MODELS["deepseek-v3"]
BIAS = "model.layers.1.mlp.gate.e_score_correction_bias"


def test_a_router_s_bias_in_bf16_is_named_in_answer_and_status_every_time(host):
    host.call(forget_buckets)
    for weights in (MODEL.second, MODEL.first, MODEL.second):
        sent = [(name, one.bfloat16()) for name, one in weights.items()]
        taken, message = host.call(update, sent)
        assert taken, message
        assert BIAS in message
        assert "fewer bits" in message
        found = host.call(status)
        assert found["consistent"], found["problems"]
        assert BIAS in found["last_refit"]["narrowed"]
        assert len(found["last_refit"]["narrowed"]) <= 16
        assert torch.equal(host.call(parameter, BIAS), weights[BIAS].bfloat16().float())
    assert found["replay"]["calls"]
    taken, message = host.call(update, list(MODEL.first.items()))  # FP32
    assert taken, message
    assert "fewer bits" not in message
    assert host.call(status)["last_refit"]["narrowed"] == []
