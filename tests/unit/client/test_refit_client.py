"""`RefitClient` against a small HTTP server that reads what SGLang would read."""

from __future__ import annotations

import base64
import copy
import gc
import io
import json
import logging
import os
import pickle
import shutil
import time
import warnings
import weakref
from contextlib import ExitStack, nullcontext
from email.message import Message
from multiprocessing import get_context
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.json_server import JsonServer
from support.plans import PLAIN, make_plan

from sglang_fp8rl.client import RefitClient
from sglang_fp8rl.client.tensor_update import is_ours
from sglang_fp8rl.errors import NoAnswerError, RefitError
from sglang_fp8rl.trainer import LocalShard, fingerprint_of
from sglang_fp8rl.trainer.bucket_numbers import BucketNumbers
from sglang_fp8rl.wire import bucket, layout_text, staging
from sglang_fp8rl.wire.bucket import Bucket
from sglang_fp8rl.wire.fingerprint import Fingerprint
from sglang_fp8rl.wire.handles import serialize
from sglang_fp8rl.wire.staging import BUFFER, FILES, OpenBuffers, default_bucket_bytes

TENSORS = [
    ("a", torch.arange(6, dtype=torch.float32).reshape(2, 3)),
    ("b", torch.arange(5, dtype=torch.bfloat16)),
    ("c", torch.arange(3, dtype=torch.float16)),
    ("d", torch.ones(2, 2).to(torch.float8_e4m3fn)),
]


class FakeServer(JsonServer):
    """Answers as SGLang does.

    Args:
        fail_at: the update call that is refused.
        busy: requests to flush the cache that are refused.
    """

    def __init__(self, *, sessions: bool, fail_at: int | None = None, busy: int = 0) -> None:
        super().__init__()
        self.sessions, self.fail_at = sessions, fail_at
        self.status: dict = {"consistent": True, "state": "whole"}
        self.busy = busy
        self.is_ours, self.tp_size = True, 2
        self.notes: list[dict] = []
        self.calls: list[str] = []
        self.asked: list[str] = []
        self.updates: list[dict] = []
        self.versions: list[str] = []
        self.keys: dict[str, str | None] = {}
        self.key_for_unknown: str | None = None
        self.received: dict[str, torch.Tensor] = {}
        self.buffers = OpenBuffers()

    def reply_to(self, path: str, body: Any, headers: Message) -> tuple[int, dict]:
        self.keys[path] = headers.get("authorization")
        if body is not None:
            return self.answer(path, body)
        self.asked.append(path)
        if path == "/fp8rl/status":
            return 200, self.status
        section = {**self.status, "flat_layout": layout_text.VERSION} if self.is_ours else None
        return 200, {"tp_size": self.tp_size, "internal_states": [{"fp8rl": section}]}

    def answer(self, path: str, body: dict) -> tuple[int, dict]:
        self.calls.append(path)
        if "rid" in body:
            self.notes.append({"path": path, **json.loads(body["rid"])["fp8rl_refit"]})
        if path.startswith("/flush_cache"):
            return self.flush()
        if path == "/update_weight_version":
            self.versions.append(body["new_version"])
            return 200, {"success": True}
        if path.endswith("_weight_update"):
            if not self.sessions:
                # Where SGLang knows no such endpoint it wants the api key before it says so.
                is_known = self.keys[path] == self.key_for_unknown
                return (404 if is_known else 401), {"detail": "Not Found"}
            return 200, {"success": True, "message": "Success"}
        if self.fail_at == len(self.updates):
            return 400, {"success": False, "message": "a: shape (2, 3); takes (4, 3)"}
        self.updates.append(body)
        payload = pickle.loads(base64.b64decode(body["serialized_named_tensors"][0]))
        assert body["load_format"] == "flattened_bucket"
        assert (BUFFER in payload) == self.is_ours
        if self.is_ours:
            self.buffers.put_memory_into(payload)
        flat, layout = payload["flattened_tensor"], payload["metadata"]
        assert isinstance(layout, str) == self.is_ours
        for meta in layout_text.from_text(layout) if self.is_ours else layout:
            there = flat[meta.start_idx : meta.end_idx].view(meta.dtype).reshape(meta.shape)
            self.received[meta.name] = there.clone()
        if body["flush_cache"]:
            return self.flush()
        return 200, {"success": True, "message": "Success"}

    def flush(self) -> tuple[int, dict]:
        self.busy -= 1
        flushed = self.busy < 0
        last = {"id": self.notes[-1]["id"]} if self.notes else {}
        self.status["last_refit"] = last | {"cache_flushed": flushed, "outcome": "ok"}
        return (200 if flushed else 400), {"success": flushed, "message": "requests are running"}


@pytest.fixture
def started():
    """Servers that run as long as the test."""
    with ExitStack() as stack:
        yield lambda **options: stack.enter_context(FakeServer(**options))


@pytest.fixture(params=[True, False], ids=["sessions", "no-sessions"])
def server(request, started):
    return started(sessions=request.param)


@pytest.mark.parametrize("bucket_bytes", [1, 30, 1 << 20])
def test_every_tensor_arrives_whatever_the_buckets(server, bucket_bytes):
    progress = []
    result = RefitClient(server.url).update(
        iter(TENSORS),
        bucket_bytes=bucket_bytes,
        on_bucket=lambda *sent: progress.append(sent),
    )
    assert list(server.received) == [name for name, _ in TENSORS]
    for name, tensor in TENSORS:
        received = server.received[name]
        assert received.dtype == tensor.dtype
        assert torch.equal(received.float(), tensor.float())
    assert result.buckets == len(server.updates) == {1: 4, 30: 3, 1 << 20: 1}[bucket_bytes]
    assert progress[-1] == (result.tensors, result.nbytes) == (4, 24 + 10 + 6 + 4)


INTEGERS = [
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.uint8,
    torch.uint16,
    torch.uint32,
    torch.uint64,
]
OTHERS = [torch.bool, torch.float64, torch.complex64, torch.float8_e5m2, torch.float8_e8m0fnu]


@pytest.mark.parametrize("dtype", INTEGERS + OTHERS, ids=str)
def test_a_tensor_of_any_dtype_that_a_parameter_has_arrives(server, dtype):
    sent = torch.tensor([0, 1, 1, 0, 1]).to(dtype)
    RefitClient(server.url).update([TENSORS[0], ("any", sent)])
    received = server.received["any"]
    assert received.dtype == dtype
    assert torch.equal(received.view(torch.uint8), sent.view(torch.uint8))


NOT_SENT = {
    "meta": (torch.empty(2, device="meta"), "on meta"),
    "sparse": (torch.eye(2).to_sparse(), "torch.sparse_coo"),
    "of no dtype that travels": (
        torch.zeros(2).byte().view(torch.float4_e2m1fn_x2),
        "torch.float4_e2m1fn_x2",
    ),
    "a shard": (LocalShard(torch.ones(2), (4,), (0,)), r"a LocalShard.*assemble"),
    "no tensor": ([1.0], "a list"),
}


@pytest.mark.parametrize("case", NOT_SENT)
def test_what_can_t_be_sent_is_refused_by_name_and_as_the_first_one_before_any_request(
    server, case
):
    tensor, words = NOT_SENT[case]
    client = RefitClient(server.url)
    with pytest.raises(RefitError, match=words) as refused:
        client.update([("x", tensor), *TENSORS])
    assert (refused.value.subject, server.calls) == ("x", [])
    with pytest.raises(RefitError, match=words) as refused:
        client.update([*TENSORS, ("x", tensor)], bucket_bytes=1)
    assert refused.value.subject == "x"


NO_ITEMS = {
    "a dict": dict(TENSORS),
    "tensors without names": [torch.ones(2)],
    "names that are no text": [(b"a", torch.ones(2))],
}


@pytest.mark.parametrize("case", NO_ITEMS)
def test_what_is_not_a_name_and_its_tensor_is_refused_before_any_request(server, case):
    with pytest.raises(RefitError, match=r"\(str, torch.Tensor\).*\.items\(\)"):
        RefitClient(server.url).update(NO_ITEMS[case])
    assert not server.asked + server.calls


def test_a_version_that_is_no_text_is_refused_with_the_remedy_before_any_request(server):
    with pytest.raises(RefitError, match=r"12; .*weight_version=str\(step\)"):
        RefitClient(server.url).update(TENSORS, weight_version=12)
    assert not server.calls


@pytest.mark.parametrize(
    ("option", "value"),
    [
        *(("bucket_bytes", value) for value in (2e3, "1GB", 0, -1, float("nan"), True)),
        *(("flush_timeout", value) for value in (None, "10", -1, float("inf"), float("nan"))),
    ],
)
def test_what_is_no_size_or_no_time_is_refused_before_any_request(started, option, value):
    """Behind the last bucket it would raise with all stored, where a flush is refused."""
    server = started(sessions=True, busy=1)
    with pytest.raises(RefitError, match=f"^{option}: {value!r}; .*Give"):
        RefitClient(server.url).update(TENSORS, **{option: value})
    assert not server.asked + server.calls


@pytest.mark.parametrize(
    ("name", "options"),
    [("model.layers.0.self_attn.k_scale", {}), ("other", {"unknown_names": "warn"})],
)
def test_what_the_server_takes_without_a_number_is_sent_and_said_to_be_unproven(
    server, monkeypatch, name, options
):
    plan, client = make_plan({"a": (PLAIN, (2, 3))}, **options), RefitClient(server.url)
    monkeypatch.setattr(client, "plan", lambda: plan)
    monkeypatch.setattr(client._connection, "plan_unless", lambda digest: None)
    monkeypatch.setattr(client, "fingerprint", lambda: fingerprint_of(TENSORS[:1], plan))
    result = client.update([TENSORS[0], (name, torch.ones(1))], verify=True)
    assert list(server.received) == ["a", name]
    assert list(result.unproven) == [name]
    alone = client.update([(name, torch.ones(1))], verify=True, partial=True)
    assert list(alone.unproven) == [name]
    stale = Fingerprint("server", {}, {"w_kc": "it was not what SGLang derives"})
    monkeypatch.setattr(client, "fingerprint", lambda: stale)
    with pytest.raises(RefitError, match="it was not what SGLang derives"):
        client.update([(name, torch.ones(1))], verify=True, partial=True)


def test_an_update_proves_itself_with_numbers_of_its_own(server, monkeypatch):
    """Another one meanwhile, a copy of the client, and the next one behind a failure don't take them."""
    plan, client = make_plan({"a": (PLAIN, (2, 3))}), RefitClient(server.url)
    monkeypatch.setattr(client, "plan", lambda: plan)
    monkeypatch.setattr(client._connection, "plan_unless", lambda digest: None)
    monkeypatch.setattr(client, "fingerprint", lambda: fingerprint_of(TENSORS[:1], plan))

    def update(then=lambda: None):
        def sent():
            assert client._proof is None
            then()
            yield TENSORS[0]

        client.update(sent(), verify=True)

    update()
    kept = client._proof
    assert kept is not None
    update()
    assert client._proof is kept
    assert copy.deepcopy(client)._proof is None
    with pytest.raises(ZeroDivisionError):
        update(lambda: 1 / 0)
    assert client._proof is None


def test_an_update_that_begins_while_another_asks_for_the_plan_takes_other_numbers(
    server, monkeypatch
):
    plan, client, taken = make_plan({"a": (PLAIN, (2, 3))}), RefitClient(server.url), []
    monkeypatch.setattr(client, "plan", lambda: plan)
    monkeypatch.setattr(client, "fingerprint", lambda: fingerprint_of(TENSORS[:1], plan))
    add = BucketNumbers.add

    def adding(proof, *args):
        taken.append(proof)
        return add(proof, *args)

    def asked(digest):
        monkeypatch.setattr(client._connection, "plan_unless", lambda digest: None)
        client.update(TENSORS[:1], verify=True)

    monkeypatch.setattr(BucketNumbers, "add", adding)
    client.update(TENSORS[:1], verify=True)
    monkeypatch.setattr(client._connection, "plan_unless", asked)
    client.update(TENSORS[:1], verify=True)
    first, nested, outer = taken
    assert outer is first
    assert nested is not first


def test_the_last_bucket_and_no_other_flushes_the_cache(server):
    RefitClient(server.url).update(TENSORS, bucket_bytes=1)
    assert [update["flush_cache"] for update in server.updates] == [False, False, False, True]


def test_one_payload_is_sent_for_each_rank(server):
    RefitClient(server.url).update(TENSORS)
    assert len(server.updates[0]["serialized_named_tensors"]) == 2
    server.tp_size = 4
    RefitClient(server.url).update(TENSORS)
    assert len(server.updates[1]["serialized_named_tensors"]) == 4


def test_what_a_server_can_do_is_asked_once_and_a_session_opened_where_it_knows_them(server):
    client = RefitClient(server.url)
    for _ in range(3):
        client.update(TENSORS, bucket_bytes=1 << 20)
    assert server.asked == ["/server_info"]
    begin, update, end = "/begin_weight_update", "/update_weights_from_tensor", "/end_weight_update"
    refits = [begin, update, end] * 3 if server.sessions else [begin, *[update] * 3]  # 404 once
    assert server.calls == refits


def test_a_server_that_was_not_of_ours_is_looked_at_again(server):
    """Nothing would be announced to it else."""
    server.is_ours = False
    client = RefitClient(server.url)
    client.update(TENSORS)
    assert not server.notes
    server.is_ours = True
    client.update(TENSORS)
    assert {note["extent"] for note in server.notes} == {"all"}


def test_it_is_asked_again_behind_what_failed(started):
    server = started(sessions=False, fail_at=1)
    client = RefitClient(server.url)
    client.update(TENSORS)
    with pytest.raises(RefitError):
        client.update(TENSORS)
    server.fail_at, server.sessions, server.tp_size = None, True, 4
    client.update(TENSORS)
    assert server.asked == ["/server_info", "/fp8rl/status", "/server_info"]
    assert len(server.updates[-1]["serialized_named_tensors"]) == 4
    assert server.calls[-1] == "/end_weight_update"


def test_it_is_asked_again_where_no_answer_came(started):
    server = started(sessions=True)
    client = RefitClient(server.url, timeout=0.2)
    client.update(TENSORS)
    port = server.server_port
    server.shutdown()
    server.server_close()
    with pytest.raises(NoAnswerError):
        client._connection.post("/begin_weight_update", {})  # the answer to no update
    assert client._connection.info is None
    assert client.url.endswith(f":{port}")


def test_a_connection_that_was_idle_is_not_used_again(server, monkeypatch):
    """The server may be about to close it, and a request that meets that would get no answer."""
    client, closed = RefitClient(server.url), []
    monkeypatch.setattr(client._connection._http, "close", lambda: closed.append(True))
    monkeypatch.setattr("sglang_fp8rl.client.connection._IDLE_SECONDS", 1e6)
    for idle in (0, 0, 2e6):
        client._connection._used -= idle
        client.update(TENSORS)
    assert closed == [True]


def test_a_process_that_was_forked_takes_a_connection_of_its_own(server, monkeypatch):
    """Over a shared one each reads the other's answers."""
    client = RefitClient(server.url)
    before = client._connection._http
    client.status()
    assert client._connection._http is before
    monkeypatch.setattr("os.getpid", lambda: 0)
    client.status()
    assert client._connection._http is not before


def test_another_server_s_session_is_not_closed_by_a_client_that_was_refused_one(started):
    server = started(sessions=True)
    client = RefitClient(server.url)
    client.update(TENSORS)
    said = "a weight-update session is already open; call end_weight_update() first."
    server.answer = lambda path, body: (
        server.calls.append(path) or (400, {"success": False, "message": said})
    )
    # Whose client was interrupted has to close it; no other request would.
    with pytest.raises(RefitError, match=r"already open.*RefitClient\.close_session\(\)"):
        client.update(TENSORS)
    assert server.calls[-1] == "/begin_weight_update"


def test_the_seconds_of_a_refit_are_those_of_its_stages(server, caplog):
    caplog.set_level(logging.DEBUG, logger="sglang_fp8rl.client")

    def slowly():
        for one in TENSORS:
            time.sleep(0.01)
            yield one

    result = RefitClient(server.url).update(slowly(), bucket_bytes=30)
    assert sum(result.stages.values()) == pytest.approx(result.seconds)
    assert result.stages["taking_tensors"] >= 0.01 * len(TENSORS)
    assert set(result.stages) == {
        "taking_tensors", "session", "filling", "making_handles", "waiting", "proving", "finishing",
    }  # fmt: skip
    assert "making_handles" in caplog.text


def test_a_whole_update_s_size_is_expected_of_the_next_one(server, monkeypatch):
    sizes, allocate = [], staging.allocate

    def allocated(nbytes, device, wanted=0):
        sizes.append((nbytes, wanted))
        return allocate(nbytes, device, wanted)

    monkeypatch.setattr(staging, "allocate", allocated)
    client = RefitClient(server.url)
    tensors, all_of_them = [(str(number), torch.ones(99)) for number in range(6)], 6 * (396 + 16)
    for _ in range(2):
        client.update(iter(tensors))
        client.update(iter(tensors[:1]), partial=True)
    assert sizes == [(5 * 400 + 396, 0), (396, 0), (396, all_of_them), (396, 0)]


def test_only_an_iterator_s_tensors_are_copied_as_they_go_by(server, monkeypatch):
    together, sent = [], [(str(number), torch.full((16,), float(number))) for number in range(4)]
    copied = bucket.copy_together
    monkeypatch.setattr(bucket, "copy_together", lambda memory, starts, tensors: (
        together.append([int(one[0]) for one in tensors]), copied(memory, starts, tensors)
    ))  # fmt: skip
    client = RefitClient(server.url)
    for named in (sent, tuple(sent), dict(sent).items()):
        client.update(named, bucket_bytes=128)
    assert together == [[0, 1], [2, 3]] * 3
    together.clear()
    client.update(iter(sent))  # whose size is known by now: each at its place
    assert together == [[]]


def test_no_tensor_is_held_behind_its_turn(server):
    gone = []

    def made():
        for number in range(4):
            tensor = torch.ones(10)
            gone.append(weakref.ref(tensor))
            yield str(number), tensor
            del tensor
            assert gone[-1]() is None, number

    RefitClient(server.url).update(made())
    assert len(gone) == 4


def test_the_default_size_of_a_bucket_goes_by_what_is_free(server, monkeypatch):
    monkeypatch.setattr("sglang_fp8rl.wire.staging.free_bytes", lambda device: 500)
    result = RefitClient(server.url).update(TENSORS)
    assert (result.bucket_bytes, result.buckets) == (32, 3)
    monkeypatch.setattr("sglang_fp8rl.wire.staging.free_bytes", lambda device: 1 << 40)
    assert default_bucket_bytes(torch.device("cpu")) == 2 << 30
    monkeypatch.setattr("sglang_fp8rl.wire.staging.free_bytes", lambda device: None)
    assert default_bucket_bytes(torch.device("cpu")) == 512 << 20


def test_buckets_are_cut_where_they_were_as_long_as_they_have_room(server, monkeypatch):
    """Others would be unknown to the server: it loads these natively instead of replaying them."""
    client, sizes = RefitClient(server.url), []
    for free in (8 << 30, 1 << 40, 5 << 30, 4 << 30, 3 << 30, 15 << 30):
        monkeypatch.setattr(staging, "free_bytes", lambda device, free=free: free)
        if free == 3 << 30:
            client.update(TENSORS, bucket_bytes=100)  # by the caller's choice, once
            client.update(TENSORS[:1], partial=True)
            assert not pickle.loads(pickle.dumps(client))._bucket_bytes
        sizes.append(client.update(TENSORS).bucket_bytes)
    assert sizes == [1 << 30] * 4 + [256 << 20] * 2
    monkeypatch.setattr(staging, "free_bytes", lambda device: 1 << 40)  # eight times as much
    assert client.update(TENSORS).bucket_bytes == 2 << 30
    client._bucket_bytes = {torch.device("cuda"): 1 << 30}
    assert client.update(TENSORS).bucket_bytes == 2 << 30
    fresh = []
    for free in range(9 << 30, 16 << 30, 1 << 30):
        monkeypatch.setattr(staging, "free_bytes", lambda device, free=free: free)
        fresh.append(RefitClient(server.url).update(TENSORS).bucket_bytes)
    assert fresh == [1 << 30] * 7


def test_a_bucket_that_finds_no_room_is_refused_by_its_size(server):
    nbytes = shutil.disk_usage(FILES).free + (1 << 30)
    tensor = torch.empty(1, dtype=torch.uint8).expand(nbytes)  # takes no memory itself
    words = rf"a bucket of {nbytes} bytes: \d+ bytes are free in /dev/shm.*bucket_bytes"
    with pytest.raises(RefitError, match=words):
        RefitClient(server.url).update([("large", tensor)])
    RefitClient(server.url).update(TENSORS)


@pytest.mark.parametrize("sessions", [True, False])
def test_a_refusal_carries_the_server_s_message_closes_the_session_and_keeps_the_old_version(
    started, sessions
):
    server = started(sessions=sessions, fail_at=1)
    with pytest.raises(RefitError, match=r"a: shape \(2, 3\); takes \(4, 3\)"):
        RefitClient(server.url).update(TENSORS, weight_version="step-7", bucket_bytes=1)
    assert (server.calls[-1] == "/end_weight_update") == sessions
    assert server.versions == []


REFUSALS = [
    (401, {"error": "Unauthorized"}),
    (400, {"success": False, "message": "the memory of the weights is released"}),
    (503, b"upstream is away"),
]


@pytest.mark.parametrize(("code", "said"), REFUSALS)
def test_a_refusal_is_not_taken_for_the_flush_of_the_refit_before(started, code, said):
    server = started(sessions=False, busy=9)  # as while generations are paused
    client = RefitClient(server.url)
    assert not client.update(TENSORS, flush_timeout=0).cache_flushed
    server.answer = lambda path, body: (code, said)
    with pytest.raises(RefitError, match=f"HTTP {code}"):
        client.update(TENSORS, flush_timeout=0)


def test_a_refusal_is_told_where_the_status_can_not_be_asked(started):
    """Several tokenizer workers have no such route."""
    server = started(sessions=False, fail_at=0)
    reply = server.reply_to
    server.reply_to = lambda path, *rest: (
        (404, {"detail": "Not Found"}) if path == "/fp8rl/status" else reply(path, *rest)
    )
    with pytest.raises(RefitError, match=r"takes \(4, 3\)"):
        RefitClient(server.url).update(TENSORS)


def test_who_keeps_an_error_keeps_no_shared_memory(started):
    """As a future does, and `sys.last_exc`."""

    def files():
        return set(Path(FILES).glob(f"torch_{os.getpid()}_*"))

    server, before = started(sessions=True, fail_at=2), files()
    with pytest.raises(RefitError) as kept:
        RefitClient(server.url).update(TENSORS, bucket_bytes=1)
    server.buffers.close()
    gc.collect()
    assert kept.tb
    assert not files() - before


@pytest.mark.parametrize("keys", [{}, {"api_key": "a"}], ids=["no key", "key"])
@pytest.mark.parametrize("code", [301, 302, 307, 308])
def test_a_redirect_is_not_followed_and_names_where_it_leads(started, code, keys):
    """A POST would become a GET, and another host would get no key: told as a wrong key or wrong tensors."""
    server, other = started(sessions=True), started(sessions=True)
    server.location, server.reply_to = f"{other.url}/server_info", lambda *_: (code, {})
    with pytest.raises(RefitError, match=f"HTTP {code}, a redirect to {other.url}"):
        RefitClient(server.url, **keys).update(TENSORS)
    assert not other.asked + other.calls


@pytest.mark.parametrize(
    ("keys", "normal", "admin"),
    [
        ({}, None, None),
        ({"api_key": "a"}, "Bearer a", "Bearer a"),
        ({"admin_api_key": "b"}, None, "Bearer b"),
        ({"api_key": "a", "admin_api_key": "b"}, "Bearer a", "Bearer b"),
    ],
)
def test_each_endpoint_gets_the_key_that_sglang_wants_there(server, keys, normal, admin):
    server.key_for_unknown = normal
    client = RefitClient(server.url, **keys)
    client.update(TENSORS, weight_version="7")
    client.status()
    if not server.sessions:
        assert server.keys.pop("/begin_weight_update") == normal
    assert server.keys.pop("/fp8rl/status") == server.keys.pop("/server_info") == normal
    assert "/update_weights_from_tensor" in server.keys
    assert set(server.keys.values()) == {admin}


def test_a_netrc_does_not_replace_a_key(server, monkeypatch, tmp_path):
    (tmp_path / "netrc").write_text("default login bob password hunter2\n")
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    RefitClient(server.url, api_key="a").status()
    assert server.keys["/fp8rl/status"] == "Bearer a"


@pytest.mark.parametrize("name", ["api_key", "admin_api_key"])
@pytest.mark.parametrize("key", ["secret\n", " secret", "s€cret", "se\ncret", b"secret"])
def test_a_key_that_no_header_holds_is_refused_when_the_client_is_made(name, key):
    with pytest.raises(RefitError, match=rf"^{name}: .*strip\(\)") as refused:
        RefitClient("http://127.0.0.1:9", **{name: key})
    assert "cret" not in str(refused.value)


@pytest.mark.parametrize("timeout", [None, 0, -1, float("inf"), float("nan"), "9"])
def test_a_timeout_that_is_no_time_is_refused_when_the_client_is_made(timeout):
    with pytest.raises(RefitError, match=r"timeout: .*seconds"):
        RefitClient("http://127.0.0.1:9", timeout=timeout)


def test_the_version_is_told_after_all_of_an_update(server):
    RefitClient(server.url).update(TENSORS, weight_version="step-7", bucket_bytes=1)
    assert (server.versions, server.calls[-1]) == (["step-7"], "/update_weight_version")


@pytest.mark.parametrize(
    ("problems", "raises"),
    [
        ([], False),
        (["refit 3 is mixed: b has not come"], False),
        (["a weight-update session is open: call end_weight_update()"], True),
        (None, True),
    ],
)
def test_a_session_that_ends_in_an_error_is_closed_all_the_same(started, problems, raises):
    """A client was killed after it had announced all: the server says what has not come, and the session ends."""
    server = started(sessions=True)
    server.status |= {} if problems is None else {"problems": problems}
    server.answer = lambda path, body: (400, {"success": False, "message": "b has not come"})
    with pytest.raises(RefitError, match="b has not come") if raises else nullcontext():
        RefitClient(server.url).close_session()


def test_a_session_whose_server_is_gone_is_not_taken_for_closed():
    with pytest.raises(NoAnswerError):
        RefitClient("http://127.0.0.1:9").close_session()


ASKED = {
    "update": lambda client: client.update(TENSORS),
    "check_plan": lambda client: client.check_plan(make_plan({"a": (PLAIN, (2, 3))})),
    "plan": RefitClient.plan,
    "fingerprint": RefitClient.fingerprint,
    "status": RefitClient.status,
    "close_session": RefitClient.close_session,
}
ODD = [(name, answer) for name in ASKED for answer in (b"<html>log in</html>", [1])]
ODD += [(name, {}) for name in ("update", "check_plan", "plan", "fingerprint")]


@pytest.mark.parametrize(("asked", "answer"), ODD)
def test_an_answer_of_something_else_than_sglang_is_refused(started, asked, answer):
    server = started(sessions=True)
    server.reply_to = lambda path, body, headers: (200, answer)
    with pytest.raises(RefitError, match=r"http://127.0.0.1|a document of format"):
        ASKED[asked](RefitClient(server.url))


def test_the_same_plan_is_the_same_where_a_proxy_drops_the_digest_that_was_asked_with(started):
    server, plan = started(sessions=True), make_plan({"a": (PLAIN, (2, 3))})
    server.reply_to = lambda *_: (200, plan.document)
    RefitClient(server.url).check_plan(plan)


@pytest.mark.parametrize("is_ours", [True, False])
def test_who_sends_to_a_server_that_serves_otherwise_is_warned(started, is_ours):
    server = started(sessions=True)
    server.is_ours = is_ours
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        RefitClient(server.url).update([("a", torch.ones(4, 3))])
    said = [str(one.message) for one in told if "fp8_blockwise_online" in str(one.message)]
    assert len(said) == (not is_ours)
    assert all(server.url in one and "keeps the scales" in one for one in said)
    assert is_ours or __file__ in {one.filename for one in told}


@pytest.mark.parametrize("states", [None, [], [None], [{}], [{"fp8rl": None}]])
def test_a_server_whose_states_say_nothing_is_sent_to_as_sglang_s_own(states):
    assert not is_ours({"internal_states": states})


def test_an_empty_update_is_refused_before_it_is_sent(server):
    with pytest.raises(RefitError, match="at least one tensor"):
        RefitClient(server.url).update([])
    assert not server.updates


@pytest.mark.parametrize("partial", [False, True])
def test_the_server_is_told_which_refit_it_is_and_what_comes(server, partial):
    for version in ("step-1", "step-2"):
        client = RefitClient(server.url)
        client.update(TENSORS, bucket_bytes=1, partial=partial, weight_version=version)
    noted = [note for note in server.notes if note["path"] != "/update_weight_version"]
    assert {note["extent"] for note in noted} == {"partial" if partial else "all"}
    of_refit = {
        version: [n["id"] for n in noted if n["version"] == version]
        for version in ("step-1", "step-2")
    }
    paths = {note["path"] for note in noted if server.sessions or "begin" not in note["path"]}
    assert paths == {"/begin_weight_update" if server.sessions else "/update_weights_from_tensor"}
    first, second = of_refit.values()
    assert len(set(first)) == len(set(second)) == 1
    assert first[0] != second[0]


def test_a_server_is_asked_directly_whatever_proxy_the_environment_names(server, monkeypatch):
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    monkeypatch.delenv("NO_PROXY", raising=False)
    monkeypatch.delenv("no_proxy", raising=False)
    assert RefitClient(server.url).status() == {"consistent": True, "state": "whole"}


def test_a_name_that_comes_twice_ends_the_update(server):
    with pytest.raises(RefitError, match="a: yielded twice"):
        RefitClient(server.url).update([*TENSORS, TENSORS[0]])


@pytest.mark.parametrize(("busy", "flushed"), [(0, True), (1, True), (2, False)])
@pytest.mark.parametrize("sessions", [True, False])
def test_a_refused_flush_is_asked_for_again_and_told(started, sessions, busy, flushed):
    server = started(sessions=sessions, busy=busy)
    result = RefitClient(server.url).update(TENSORS, flush_timeout=3)
    assert result.cache_flushed == flushed
    assert [call for call in server.calls if "flush" in call] == ["/flush_cache?timeout=3"] * (
        busy > 0
    )


def test_tensors_in_a_bucket_are_aligned_for_their_dtype():
    tensors = [
        ("odd", torch.ones(3, dtype=torch.uint8)),
        *TENSORS,
        ("last", torch.ones(2).double()),
    ]
    filled = Bucket.of(tensors)
    flat, metadata = filled.flat, filled.metadata
    for (name, tensor), meta in zip(tensors, metadata, strict=True):
        assert meta.name == name
        assert meta.start_idx % tensor.element_size() == 0
        view = flat[meta.start_idx : meta.end_idx].view(meta.dtype).view(meta.shape)
        assert torch.equal(view.float(), tensor.float())


def test_a_process_that_was_not_started_by_this_one_can_read_it():
    filled = Bucket.of(TENSORS)
    flat, metadata = filled.flat, filled.metadata
    text = serialize({"flattened_tensor": flat, "metadata": metadata})
    with get_context("spawn").Pool(1) as pool:
        assert pool.apply(_sum_of, (text,)) == int(flat.to(torch.int64).sum())


def test_the_sharing_strategy_is_left_as_it_was():
    before = torch.multiprocessing.get_sharing_strategy()
    serialize(torch.ones(2))
    assert torch.multiprocessing.get_sharing_strategy() == before


def test_the_payload_names_nothing_that_sglang_refuses_to_load():
    """SGLang 0.5.23 loads an exact list of globals, 0.5.16 a list of modules."""
    filled = Bucket.of(TENSORS)
    flat, metadata = filled.flat, filled.metadata
    allowed = pytest.importorskip("sglang.srt.utils.common").SafeUnpickler
    data = base64.b64decode(serialize({"flattened_tensor": flat, "metadata": metadata}))
    payload = allowed(io.BytesIO(data)).load()
    assert isinstance(payload["metadata"][0], SimpleNamespace)
    assert torch.equal(payload["flattened_tensor"], flat)


def _sum_of(text: str) -> int:
    payload = pickle.loads(base64.b64decode(text))
    return int(payload["flattened_tensor"].to(torch.int64).sum())
