"""A head that the model ties to its embedding is not stored, and not dropped without a look: it has to be the embedding."""

from __future__ import annotations

import pytest
import torch
from support.engine.commands import digests, plan_document, status
from support.engine.models import MODELS
from support.engine.pool import on

from sglang_fp8rl.trainer.fingerprint import fingerprint_of
from sglang_fp8rl.wire.plan import RefitPlan

pytestmark = pytest.mark.engine

HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
MODEL = MODELS["qwen3-tied"]
TIED = on("qwen3-tied-tp1", slow=("qwen3-tied-tp2",))


def with_head(which: str, head: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
    """All tensors, the head first: the embedding may come behind it."""
    return [(HEAD, head), *getattr(MODEL, which).items()]


def untied(which: str) -> torch.Tensor:
    """In one element of the last row, which the last rank holds."""
    head = getattr(MODEL, which)[EMBEDDING].clone()
    head[-1, 5] += 1
    return head


def in_buckets(host, items, load_format, count=3):
    """All but the last are sent; the last one."""
    for at in range(count - 1):
        host.send(items[at::count], load_format, False)
    return items[count - 1 :: count]


@TIED
@pytest.mark.parametrize("load_format", [None, "flattened_bucket"])
def test_an_update_brings_the_head_with_the_embedding_or_is_refused(host, load_format):
    expected = host.fresh("second").digests
    # Natively, then replayed, with what was recorded of a good one and of a bad one.
    for which in ("second", "first", "second"):
        items = with_head(which, getattr(MODEL, which)[EMBEDDING])
        host.send(in_buckets(host, items, load_format), load_format)
        assert host.call(status)["state"] == "whole", host.call(status)["problems"]
        last = in_buckets(host, with_head(which, untied(which)), load_format)
        host.refuses(last, HEAD, "tie", load_format=load_format)
    assert host.call(status)["replay"]["calls"] > 0
    assert host.call_all(digests) == expected  # all else was stored


@TIED
@pytest.mark.parametrize("load_format", [None, "flattened_bucket"])
def test_a_head_alone_is_held_against_what_is_served(host, load_format):
    for _ in range(2):
        host.send([(HEAD, MODEL.first[EMBEDDING])], load_format)
        assert host.call(status)["state"] == "whole"
        host.refuses([(HEAD, untied("first"))], HEAD, load_format=load_format)
        host.update_to("first")
    host.refuses([(HEAD, MODEL.first[EMBEDDING][:-1])], "shape", load_format=load_format)


@TIED
def test_the_trainer_s_fingerprint_tells_a_head_that_is_not_the_embedding(host):
    plan = RefitPlan.from_dict(host.call(plan_document))
    assert plan.tied_to(HEAD) == EMBEDDING
    tied = fingerprint_of(with_head("first", MODEL.first[EMBEDDING]), plan)
    assert (HEAD in tied.numbers, dict(tied.differing)) == (False, {})
    assert tied.numbers == fingerprint_of(MODEL.first.items(), plan).numbers
    assert HEAD in fingerprint_of(with_head("first", untied("first")), plan).differing
    alone = fingerprint_of([(HEAD, untied("first"))], plan)
    assert alone.numbers.keys() == {EMBEDDING}
    assert alone.numbers[EMBEDDING] != tied.numbers[EMBEDDING]
