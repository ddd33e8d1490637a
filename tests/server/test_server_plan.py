"""`GET /fp8rl/plan` of a real server, and updates that were quantized by it."""

from __future__ import annotations

import copy

import pytest
import requests
from support.engine.models import checkpoint
from support.server.served import MODEL, Client, weights

from sglang_fp8rl import RefitPlan, fetch_plan
from sglang_fp8rl.errors import RefitError
from sglang_fp8rl.lab.plan_offline import make_plan
from sglang_fp8rl.lab.testing.ports import free_port
from sglang_fp8rl.trainer import WireStats, quantize_for_refit
from sglang_fp8rl.wire.plan import PLAN_PATH, digest_of

pytestmark = [pytest.mark.engine, pytest.mark.xdist_group("server")]


@pytest.mark.usefixtures("plans_in_forks")
def test_the_server_gives_the_plan_of_the_command(case, checkpoint_dir):
    planned = make_plan(str(checkpoint(checkpoint_dir, MODEL, "first"))).document
    assert fetch_plan(case.server.url).as_dict() == planned
    assert "fp8rl_plan" not in str(case.client.server_info())


def test_only_the_digest_is_asked_for_where_it_is_known(case):
    plan = case.client.plan()
    url, known = case.server.url + PLAN_PATH, {"If-None-Match": f'"{plan.digest}"'}
    answer = requests.get(url, headers=known, timeout=60)
    assert (answer.status_code, answer.content) == (304, b"")
    case.client.check_plan(plan)
    other = requests.get(url, headers={"If-None-Match": '"sha256:0"'}, timeout=60)
    assert other.status_code == 200
    assert RefitPlan.from_dict(other.json()) == plan


@pytest.mark.parametrize("bucket_bytes", [512 << 20, 200_000])
def test_quantized_by_the_trainer_the_outputs_are_those_of_a_fresh_server(case, bucket_bytes):
    plan, stats = case.client.plan(), WireStats()
    for which in ("second", "first"):
        result = case.client.update(
            quantize_for_refit(weights(which), plan, stats=stats),
            bucket_bytes=bucket_bytes,
            plan=plan,
        )
        case.check(which)
    assert result.nbytes * 2 == stats.nbytes
    assert stats.nbytes < stats.nbytes_bf16 < stats.nbytes_fp32


def test_the_plan_of_another_server_is_refused_and_nothing_is_sent(case):
    document = copy.deepcopy(case.client.plan().as_dict())
    document["options"]["use_weight_pow2_scale"] = True
    document["digest"] = digest_of(document)
    other = RefitPlan.from_dict(document)
    before = case.client.status()["last_refit"]

    def never():
        raise AssertionError("a tensor was asked for")
        yield

    with pytest.raises(RefitError, match=r"(?s)nothing was sent.*fetch_plan"):
        case.client.update(never(), plan=other)
    assert case.client.status()["last_refit"] == before
    case.check("first")


def test_a_server_that_is_not_there_is_an_error_with_its_address():
    url = f"http://127.0.0.1:{free_port()}"
    with pytest.raises(RefitError, match=r"(?s)127\.0\.0\.1.*running server"):
        Client(url).plan()
