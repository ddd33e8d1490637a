"""SGLang's own `POST /weights_checker`, by which slime and miles prove a refit, on this method.

Its action `compare` moves every tensor to CUDA, so without a GPU its checksums are compared.
"""

from __future__ import annotations

from importlib.metadata import version

import pytest
from packaging.version import Version
from support.engine.models import checkpoint
from support.server.served import MODEL, weights

pytestmark = [
    pytest.mark.engine,
    pytest.mark.xdist_group("server"),
    pytest.mark.skipif(
        Version(version("sglang")) < Version("0.5.23"),
        reason="its checksum asks for CUDA",
    ),
]


def post(case, path: str, **body) -> dict:
    status, answer = case.post(path, body)
    assert status == 200, answer
    return answer


def do(case, action: str) -> dict:
    return post(case, "/weights_checker", action=action)


def checksums(case) -> dict[str, str]:
    (rank,) = do(case, "checksum")["ranks"]
    return rank["checksums"]


@pytest.mark.parametrize("way", ["client", "disk", "tensor"])
def test_a_refit_brings_back_what_the_checker_destroyed(case, checkpoint_dir, way):
    before = checksums(case)
    do(case, "snapshot")
    do(case, "reset_tensors")
    assert not set(checksums(case).items()) & set(before.items())
    if way == "client":
        case.client.update(weights("first"))
    elif way == "disk":
        path = str(checkpoint(checkpoint_dir, MODEL, "first"))
        post(case, "/update_weights_from_disk", model_path=path)
    else:
        from sglang.srt.utils import MultiprocessingSerializer

        payload = [MultiprocessingSerializer.serialize(weights("first"), True)]
        post(case, "/update_weights_from_tensor", serialized_named_tensors=payload)
    assert checksums(case) == before
    case.check("first")


def test_the_checker_names_what_a_wrong_refit_left(case):
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


def test_checksums_are_of_the_weights_and_not_of_their_way(case):
    """The same after an update there and back, whatever the buckets; another weight set has others."""
    first = checksums(case)
    case.client.update(weights("second"), bucket_bytes=100_000)
    second = checksums(case)
    assert first.keys() == second.keys()
    assert not set(first.items()) & set(second.items())
    case.client.update(weights("first"))
    assert checksums(case) == first
