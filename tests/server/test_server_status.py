"""The status and the metrics of a running server, where a client finds them."""

from __future__ import annotations

import re

import pytest
import requests
from _served import MODEL, ONE_THREAD, QUANTIZED, Client, weights
from models import checkpoint

pytestmark = pytest.mark.engine

KEYS = {"api_key": "key", "admin_api_key": "admin"}


@pytest.fixture
def guarded(server, checkpoint_dir):
    """A server that wants two keys and counts."""
    flags = ("--api-key=key", "--admin-api-key=admin", "--enable-metrics")
    path = checkpoint(checkpoint_dir, MODEL, "first")
    return server(path, QUANTIZED, *flags, env=ONE_THREAD)


def metric(text: str, name: str) -> float:
    found = re.search(rf"^sglang:fp8rl_{name}(?:{{[^}}]*}})? (\S+)$", text, re.MULTILINE)
    assert found, f"{name} is not in {text[-2000:]}"
    return float(found.group(1))


def version_of(client: Client) -> str:
    """Which weights made a generated token."""
    return client.generate([1, 2, 3])["meta_info"]["weight_version"]


def test_an_update_with_both_keys_a_version_and_metrics(guarded):
    client = Client(guarded.url, **KEYS)
    before = version_of(client)
    with pytest.raises(Exception, match="admin"):
        Client(guarded.url, api_key="key").update(weights("second"), weight_version="wrong")
    assert version_of(client) == before
    client.update(weights("second"), weight_version="step-2")
    client.update(weights("first"), weight_version="step-3")
    assert version_of(client) == "step-3"
    section = client.server_info()["internal_states"][0]["fp8rl"]
    assert client.status() == section
    text = requests.get(guarded.url + "/metrics", timeout=60).text
    assert metric(text, "refits_total") == 2
    assert metric(text, "consistent") == 1
    assert metric(text, "refit_bytes") == section["last_refit"]["bytes"]
    assert metric(text, "sqnr_db") > 25
