"""veRL 0.9.1's real code against real servers: two FSDP ranks, TP=1 and TP=2.

Either by its parts, which know no sessions and flush the cache with every bucket; or by the adapter
that this package registers with it.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from support.engine.models import checkpoint
from support.server.served import (
    MODEL,
    ONE_THREAD,
    PROMPTS,
    QUANTIZED,
    Client,
    Served,
    version_of,
    weights,
)
from support.server.verl_ranks import WORLD_SIZE, Trainer

from sglang_fp8rl.lab.testing.outputs import ask, differences
from sglang_fp8rl.lab.testing.ports import free_port
from sglang_fp8rl.wire.bucket import Bucket

pytestmark = [pytest.mark.engine, pytest.mark.timeout(1200), pytest.mark.xdist_group("server")]

TENSORS = len(MODEL.first)
SMALL, LARGE = 100_000, 1 << 30  # bytes; the first is less than most tensors


@pytest.fixture(scope="module")
def trainer(tmp_path_factory):
    ranks = Trainer(tmp_path_factory.mktemp("trainer"))
    yield ranks
    ranks.close()


@pytest.fixture
def refit(trainer, checkpoint_dir):
    """A refit of a server that has to succeed."""

    def run(case, which, dtype="float32", bucket_bytes=LARGE, tp_size=1, **more) -> None:
        path = checkpoint(checkpoint_dir, MODEL, which)
        trainer.start_refit(case, path, dtype, bucket_bytes, tp_size=tp_size, **more)
        for rank in range(WORLD_SIZE):
            said = trainer.answer(rank)
            if "error" in said:
                trainer.close()  # the other rank may wait for this one for ever
                raise AssertionError((rank, said["error"], trainer.log(rank)))
            if rank == 0:
                answers = said["answers"][:-1]  # the last is of the flush
        if more.get("by_adapter"):
            return
        assert all(answer["success"] for answer in answers), answers
        # The server sees what it is said to see: one bucket, or nearly a bucket for each tensor.
        assert len(answers) == 1 if bucket_bytes == LARGE else len(answers) > TENSORS // 2

    return run


@pytest.fixture
def refused(trainer, checkpoint_dir):
    """What each rank says of a refit that fails."""

    def run(case, bucket_bytes=LARGE, tp_size=1, **more) -> list[str]:
        path = checkpoint(checkpoint_dir, MODEL, "second")
        trainer.start_refit(case, path, "float32", bucket_bytes, tp_size=tp_size, **more)
        return [trainer.answer(rank).get("error", "") for rank in range(WORLD_SIZE)]

    return run


@pytest.mark.parametrize("bucket_bytes", [SMALL, LARGE], ids=["small-buckets", "one-bucket"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_refit_by_verl_equals_a_fresh_server(case, refit, dtype, bucket_bytes):
    for which in ("second", "first"):
        refit(case, which, dtype, bucket_bytes)
        case.check(which)


@pytest.mark.parametrize("by_adapter", [False, True])
def test_quantized_before_transfer_in_verl_equals_a_fresh_server(case, refit, by_adapter):
    """Our adapter's calls are one refit, with sessions and without, so its buckets may part a weight from its
    scale; each of veRL's stands alone."""
    bucket_bytes = SMALL if by_adapter else LARGE
    for which in ("second", "first"):
        refit(case, which, "float32", bucket_bytes, is_quantized=True, by_adapter=by_adapter)
        case.check(which)


@pytest.mark.parametrize("bucket_bytes", [SMALL, LARGE], ids=["small-buckets", "one-bucket"])
def test_a_refit_by_this_package_s_adapter_equals_a_fresh_server(case, refit, bucket_bytes):
    """Flattened buckets in a session; the step is SGLang's weight version."""
    for step, which in enumerate(("second", "first"), 7):
        refit(case, which, "float32", bucket_bytes, by_adapter=True, step=step)
        case.check(which)
    assert version_of(case.client) == "8"


@pytest.fixture(scope="module")
def at_tp2(server, checkpoint_dir) -> Served:
    """A server at TP=2 started on the first weights. What the second have to give is read after an
    update from disk, which at TP=2 gives the bytes of a fresh load (`test_laws`)."""
    running = server(
        checkpoint(checkpoint_dir, MODEL, "first"), QUANTIZED, "--tp-size=2", env=ONE_THREAD
    )
    client = Client(running.url)
    case = Served(running, client, {"first": ask(client, PROMPTS)})
    for which in ("second", "first"):
        path = str(checkpoint(checkpoint_dir, MODEL, which))
        status, answer = case.post("/update_weights_from_disk", {"model_path": path})
        assert status == 200, answer
        case.expected.setdefault(which, ask(client, PROMPTS))
    case.check("first")
    assert len(differences(case.expected["first"], case.expected["second"])) == len(PROMPTS)
    return case


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "bucket_bytes", "by_adapter"),
    [("float32", SMALL, False), ("bfloat16", LARGE, False), ("float32", SMALL, True)],
    ids=["fp32-small-buckets", "bf16-one-bucket", "adapter"],
)
def test_a_refit_equals_a_fresh_server_at_tp2(at_tp2, refit, dtype, bucket_bytes, by_adapter):
    for which in ("second", "first"):
        refit(at_tp2, which, dtype, bucket_bytes, tp_size=2, by_adapter=by_adapter)
        at_tp2.check(which)


def test_verl_is_told_when_an_update_is_refused(case, refit, refused):
    """Its adapter raises on HTTP 400: a trainer does not go on with weights nobody serves."""
    assert "400" in refused(case, suffix="_wrong")[0]
    refit(case, "first")
    case.check("first")


def test_a_trainer_that_leaves_tensors_out_is_told_their_names(case, refit, refused):
    """The adapter announces all: in its session where SGLang has them, by name where it has none."""
    forgotten = "model.layers.1.mlp.down_proj.weight"
    assert forgotten in MODEL.first
    more = {"by_adapter": True, "leaves_out": forgotten}
    said = refused(case, **more)[0]
    assert said.startswith("RefitError: "), said
    assert forgotten in said
    assert case.client.status()["last_refit"]["complete"] is False
    assert case.client.status()["state"] == "failed"
    more["custom"] = {"fp8rl_extent": "partial"}
    refit(case, "first", **more)
    refit(case, "first", by_adapter=True)
    case.check("first")


def test_a_server_that_refuses_leaves_no_rank_of_another_one_waiting(case, refit, refused):
    """Two servers of TP 1: what the one's rank gathers, the other's has to gather with it."""
    one, other = refused(case, SMALL, by_adapter=True, suffix="_wrong")
    assert "_wrong" in one
    assert other == ""
    refit(case, "first", by_adapter=True)
    case.check("first")


def test_verl_s_deltas_are_refused_by_name(case, refit, refused):
    """By the adapter; and by the server, whoever sends them."""
    said = refused(case, by_adapter=True, wire_format="delta_flush")[0]
    loader = "verl.workers.rollout.sglang_rollout.delta_loader.apply_delta"
    payload = Bucket.of(weights("second")[:1]).payload(1, False)
    body = {"serialized_named_tensors": payload.texts, "load_format": loader}
    status, answer = case.post("/update_weights_from_tensor", body)
    assert status == 400
    for text in (said, answer["message"]):
        for words in ("delta_sharded", "verify flush", "naive, nccl or nixl", "fingerprint"):
            assert words in text, text
    refit(case, "first", by_adapter=True)
    case.check("first")


@pytest.mark.slow
def test_every_rank_is_told_why_when_the_server_has_another_model(at_tp2, refit, refused):
    """By this package's adapter: the server's own words, on both ranks; the server goes on."""
    more = {"by_adapter": True, "step": 99}
    for said in refused(at_tp2, tp_size=2, suffix="_wrong", **more):
        assert said.startswith("RefitError: POST /update_weights_from_tensor: HTTP 400"), said
        assert "_wrong" in said
        assert "/fp8rl/plan" in said
    assert version_of(at_tp2.client) != "99"
    refit(at_tp2, "first", tp_size=2, by_adapter=True)
    at_tp2.check("first")


def test_a_server_that_died_between_refits_is_named(refused):
    case = SimpleNamespace(server=SimpleNamespace(port=free_port()))
    for error in refused(case, tp_size=2, by_adapter=True):
        assert f"127.0.0.1:{case.server.port}" in error
        assert "no answer" in error
        assert "last checkpoint" in error
