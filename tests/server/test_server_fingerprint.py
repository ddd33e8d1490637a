"""`GET /fp8rl/fingerprint` of a real server: proven against a trainer, a checkpoint and itself."""

from __future__ import annotations

import json

import pytest
import requests
from support.engine.models import checkpoint
from support.server.served import MODEL, ONE_THREAD, QUANTIZED, Client, weights
from typer.testing import CliRunner

from sglang_fp8rl.errors import RefitError
from sglang_fp8rl.lab import cli
from sglang_fp8rl.trainer import quantize_for_refit
from sglang_fp8rl.trainer.bucket_numbers import BucketNumbers
from sglang_fp8rl.wire.bucket import Bucket
from sglang_fp8rl.wire.fingerprint import FINGERPRINT_PATH

pytestmark = [pytest.mark.engine, pytest.mark.xdist_group("server")]

NAME = "model.layers.1.mlp.down_proj.weight"


@pytest.fixture
def client(server, checkpoint_dir):
    path = checkpoint(checkpoint_dir, MODEL, "first")
    return Client(server(path, QUANTIZED, env=ONE_THREAD).url)


def test_the_server_is_verified_without_sending_anything(client):
    client.update(weights("first"))
    found = client.verify(weights("first"))
    assert found.ok
    assert found.compared > 10
    assert not found.unproven
    other = dict(weights("first"))
    other[NAME] = other[NAME] * 2
    del other["model.norm.weight"]
    found = client.verify(other.items())
    assert (list(found.differing), list(found.missing)) == ([NAME], ["model.norm.weight"])
    assert client.verify(other.items(), partial=True).missing == {}


@pytest.mark.parametrize("is_quantized", [False, True])
def test_an_update_proves_itself(client, is_quantized):
    plan = client.plan()
    for which in ("second", "first"):
        sent = weights(which)
        client.update(
            quantize_for_refit(sent, plan) if is_quantized else sent,
            bucket_bytes=200_000,
            plan=plan,
            verify=True,
        )
        assert client.verify(weights(which)).ok


def test_an_update_that_was_not_served_as_sent_fails_by_name(client, monkeypatch):
    """What the client counts is not what it sent."""
    add = BucketNumbers.add

    def other(self, numbers, bucket):
        sent = dict(map(bucket.tensor, range(len(bucket.metadata))))
        if NAME in sent:
            sent[NAME] = sent[NAME] + 1
        add(self, numbers, Bucket.of(list(sent.items())))

    monkeypatch.setattr(BucketNumbers, "add", other)
    with pytest.raises(RefitError, match=NAME):
        client.update(weights("first"), verify=True)
    monkeypatch.undo()
    client.update(weights("first"), verify=True)


def test_the_command_compares_a_server_with_itself_and_with_checkpoints(client, checkpoint_dir):
    client.update(weights("first"))
    url = client.url

    def run(*args):
        result = CliRunner().invoke(cli.app, ["verify", url, *args, "--json"])
        return result.exit_code, json.loads(result.stdout)

    assert run()[0] == 0
    assert run(url)[1][1]["compared"] > 10
    right, wrong = (str(checkpoint(checkpoint_dir, MODEL, which)) for which in ("first", "second"))
    status, [found] = run("--checkpoint", right)
    assert (status, found["ok"], found["unproven"]) == (0, True, {})
    status, [found] = run("--checkpoint", wrong)
    assert status == cli.FOUND_WRONG
    assert NAME in found["differing"]


def test_the_document_has_every_name_of_the_plan(client):
    document = requests.get(client.url + FINGERPRINT_PATH, timeout=60).json()
    plan = client.plan()
    assert set(document["tensors"]) == {
        name for name, entry in plan.tensors.items() if entry.scheme != "unused"
    }
