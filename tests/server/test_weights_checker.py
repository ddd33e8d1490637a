"""SGLang's own `POST /weights_checker`, by which slime and miles prove a refit, on this method.

Its action `compare` moves every tensor to CUDA, so without a GPU its checksums are compared.
"""

from __future__ import annotations

from importlib.metadata import version

import pytest
from packaging.version import Version
from support.server.served import MODEL, served, weights

pytestmark = [
    pytest.mark.engine,
    pytest.mark.xdist_group("server"),
    pytest.mark.skipif(
        Version(version("sglang")) < Version("0.5.23"),
        reason="its checksum asks for CUDA",
    ),
]


def do(case, action: str) -> dict:
    status, answer = case.post("/weights_checker", {"action": action})
    assert status == 200, answer
    return answer


def checksums(case) -> dict[str, str]:
    (rank,) = do(case, "checksum")["ranks"]
    return rank["checksums"]


def test_a_refit_brings_back_what_the_checker_destroyed(server, checkpoint_dir):
    case = served(server, checkpoint_dir)
    before = checksums(case)
    do(case, "reset_tensors")
    assert not set(checksums(case).items()) & set(before.items())
    case.client.update(weights("first"))
    assert checksums(case) == before
    case.check("first")


def test_the_checker_names_what_a_wrong_refit_left(server, checkpoint_dir):
    case = served(server, checkpoint_dir)
    before = checksums(case)
    do(case, "reset_tensors")
    wrong = "model.layers.1.mlp.down_proj.weight"
    assert wrong in MODEL.first
    sent = [(name, 1.25 * weight if name == wrong else weight) for name, weight in weights("first")]
    case.client.update(sent)
    after = checksums(case)
    assert {name for name in before if after[name] != before[name]} == {wrong}
    case.client.update(weights("first"))
    assert checksums(case) == before
    case.check("first")


def test_checksums_are_of_the_weights_and_not_of_their_way(server, checkpoint_dir):
    """The same after an update there and back, whatever the buckets; another weight set has others."""
    case = served(server, checkpoint_dir)
    first = checksums(case)
    case.client.update(weights("second"), bucket_bytes=100_000)
    second = checksums(case)
    assert first.keys() == second.keys()
    assert not set(first.items()) & set(second.items())
    case.client.update(weights("first"))
    assert checksums(case) == first
