"""`GET /fp8rl/plan` of a real server, and updates that were quantized by it."""

from __future__ import annotations

import copy

import pytest
import requests
from support.engine.models import checkpoint
from support.server.served import MODEL, Client, served, weights

from sglang_fp8rl import RefitPlan, fetch_plan
from sglang_fp8rl.errors import RefitError
from sglang_fp8rl.lab.plan_offline import make_plan
from sglang_fp8rl.lab.testing.ports import free_port
from sglang_fp8rl.trainer import WireStats, quantize_for_refit
from sglang_fp8rl.wire.plan import PLAN_PATH, digest_of

pytestmark = [pytest.mark.engine, pytest.mark.xdist_group("server")]


@pytest.fixture
def running(server, checkpoint_dir):
    return served(server, checkpoint_dir)


@pytest.mark.usefixtures("plans_in_forks")
def test_the_server_gives_the_plan_of_the_command(running, checkpoint_dir):
    planned = make_plan(str(checkpoint(checkpoint_dir, MODEL, "first"))).document
    assert fetch_plan(running.server.url).as_dict() == planned
    assert "fp8rl_plan" not in str(running.client.server_info())


def test_only_the_digest_is_asked_for_where_it_is_known(running):
    plan = running.client.plan()
    url, known = running.server.url + PLAN_PATH, {"If-None-Match": f'"{plan.digest}"'}
    answer = requests.get(url, headers=known, timeout=60)
    assert (answer.status_code, answer.content) == (304, b"")
    running.client.check_plan(plan)
    other = requests.get(url, headers={"If-None-Match": '"sha256:0"'}, timeout=60)
    assert other.status_code == 200
    assert RefitPlan.from_dict(other.json()) == plan


@pytest.mark.parametrize("bucket_bytes", [512 << 20, 200_000])
def test_quantized_by_the_trainer_the_outputs_are_those_of_a_fresh_server(running, bucket_bytes):
    plan, stats = running.client.plan(), WireStats()
    for which in ("second", "first"):
        result = running.client.update(
            quantize_for_refit(weights(which), plan, stats=stats),
            bucket_bytes=bucket_bytes,
            plan=plan,
        )
        running.check(which)
    assert result.nbytes * 2 == stats.nbytes
    assert stats.nbytes < stats.nbytes_bf16 < stats.nbytes_fp32


def test_the_plan_of_another_server_is_refused_and_nothing_is_sent(running):
    document = copy.deepcopy(running.client.plan().as_dict())
    document["options"]["use_weight_pow2_scale"] = True
    document["digest"] = digest_of(document)
    other = RefitPlan.from_dict(document)
    before = running.client.status()["last_refit"]

    def never():
        raise AssertionError("a tensor was asked for")
        yield

    with pytest.raises(RefitError, match=r"(?s)nothing was sent.*fetch_plan"):
        running.client.update(never(), plan=other)
    assert running.client.status()["last_refit"] == before
    running.check("first")


def test_a_server_that_is_not_there_is_an_error_with_its_address():
    url = f"http://127.0.0.1:{free_port()}"
    with pytest.raises(RefitError, match=r"(?s)127\.0\.0\.1.*running server"):
        Client(url).plan()
