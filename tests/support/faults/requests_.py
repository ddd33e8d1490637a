"""Requests that are none, connections that break, and clients that get in each other's way."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

import requests

from sglang_fp8rl.client import RefitClient
from sglang_fp8rl.errors import NoAnswerError, RefitError
from sglang_fp8rl.versions import HAS_SESSIONS
from sglang_fp8rl.wire.handles import serialize

from .bad_network import network_that_loses_answers
from .fault import Group, Then
from .trainer import DOWN, NORM, QUERY, UP, Answer, ServerTrainer, said_by

GROUP = Group("Requests and connections", needs_server=True)
row = GROUP.row
UPDATE = "/update_weights_from_tensor"
SMALL = {"bucket_bytes": 400_000}
# Nobody tells a SGLang without sessions that a refit was given up.
GIVEN_UP = None if HAS_SESSIONS else Then.OPEN


@row(host=True, then=Then.WHOLE)
def a_body_that_is_not_json(trainer: ServerTrainer) -> Answer:
    headers = {"Content-Type": "application/json"}
    return trainer.http("POST", UPDATE, data=b"{not json", headers=headers)


@row(host=True, then=Then.WHOLE)
def a_body_of_random_bytes(trainer: ServerTrainer) -> Answer:
    return trainer.http("POST", UPDATE, data=bytes(range(256)) * 4)


def posted(word: str, path: str, body: Any, *told: str, **options: Any) -> None:
    """A row for a body that SGLang refuses before it looks at weights."""
    row(*told, host=True, **{"then": Then.WHOLE, **options}, word=word)(
        lambda trainer: trainer.post(path, body)
    )


def payloads(*of: Any, **more: Any) -> dict[str, Any]:
    return {"serialized_named_tensors": list(of), **more}


MISSING = "serialized_named_tensors"
posted("a_body_that_is_a_list", UPDATE, [1, 2, 3])
posted("a_body_without_tensors", UPDATE, {"flush_cache": True}, MISSING)
posted("a_body_with_other_keys", UPDATE, {"named_tensors": [], "flush": True}, MISSING)
posted("a_payload_that_is_not_base64", UPDATE, payloads("not base64 at all!", flush_cache=True))
posted("payloads_that_are_numbers", UPDATE, payloads(1, 2))
posted(
    "a_flush_that_is_neither_true_nor_false",
    UPDATE,
    payloads(serialize([]), flush_cache="maybe"),
)
posted("a_disk_update_without_a_path", "/update_weights_from_disk", {})


@row(code=405, host=True, then=Then.WHOLE)
def an_update_that_is_asked_for_by_get(trainer: ServerTrainer) -> Answer:
    return trainer.http("GET", UPDATE)


posted(
    "a_session_for_a_model_that_nobody_has",
    "/begin_weight_update",
    {"selector": "nobody"},
    needs_sessions=True,
)


@row("selector", "no draft model", needs_sessions=True)
def an_update_of_a_draft_that_is_not_there(trainer: ServerTrainer) -> Answer:
    trainer.memory.append(trainer.new[NORM])
    body = {"serialized_named_tensors": [serialize([trainer.fresh(NORM)])], "selector": "draft"}
    return trainer.post(UPDATE, body)


posted(
    "tensors_from_a_group_that_nobody_joined",
    "/update_weights_from_distributed",
    {"names": [NORM], "dtypes": ["bfloat16"], "shapes": [[256]], "group_name": "nobody"},
    then=Then.FAILED,
)
posted(
    "a_handle_of_another_process_that_is_none",
    "/update_weights_from_ipc",
    {"zmq_handles": {"nobody": "ipc:///nowhere"}},
    then=Then.FAILED,
)


def connected(trainer: ServerTrainer) -> socket.socket:
    parts = urlsplit(trainer.url)
    assert parts.hostname
    return socket.create_connection((parts.hostname, parts.port or 80), timeout=30)


def request(trainer: ServerTrainer, *names: str) -> bytes:
    """A whole POST of an update, as bytes."""
    pairs = [trainer.fresh(name) for name in names]
    trainer.memory.append(pairs)
    body = json.dumps({"serialized_named_tensors": [serialize(pairs)]}).encode()
    head = f"POST {UPDATE} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


@row(code=0, then=Then.WHOLE)
def a_connection_that_breaks_in_mid_body(trainer: ServerTrainer) -> Answer:
    with connected(trainer) as wire:
        wire.sendall(request(trainer, DOWN)[:-100])
    return Answer(0, "")


@row(code=0, then=Then.MIXED, serves=[UP])
def a_client_that_leaves_before_the_answer(trainer: ServerTrainer) -> Answer:
    """What it had sent is served, and the status says that it is not all."""
    with connected(trainer) as wire:
        wire.sendall(request(trainer, UP))
    while trainer.client().status()["last_refit"]["tensors"] != 1:
        pass
    return Answer(0, "")


@row(code=200, then=Then.OPEN, serves=[UP], host=True)
def an_update_in_mid_generation(trainer: ServerTrainer) -> Answer:
    """Four generations run; all of them are answered in full."""
    answers: list[dict] = []

    def generate() -> None:
        answers.append(trainer.client().generate([5, 6, 7], max_new_tokens=24))

    threads = [threading.Thread(target=generate) for _ in range(4)]
    for thread in threads:
        thread.start()
    answer = trainer.send(trainer.fresh(UP), flush=False)
    for thread in threads:
        thread.join()
    assert [len(one["meta_info"]["output_token_logprobs"]) for one in answers] == [24] * 4
    return answer


@row("cache", "flush", host=True, then=Then.MIXED, serves=[UP])
def an_update_of_paused_generations_that_flushes(trainer: ServerTrainer) -> Answer:
    """SGLang stores the weights and can't flush the cache under requests that stand still."""
    with generating(trainer, 512) as stream:  # more than a slow client lets pass
        next(stream)
        assert trainer.post("/pause_generation", {"mode": "in_place"}).code == 200
        try:
            return trainer.send(trainer.fresh(UP))
        finally:
            assert trainer.post("/continue_generation").code == 200
            assert sum(1 for _ in stream)


@contextmanager
def generating(trainer: ServerTrainer, tokens: int) -> Iterator[Iterator[bytes]]:
    """A generation that runs: its answer line by line."""
    sampling = {"max_new_tokens": tokens, "ignore_eos": True}
    body = {"input_ids": [5, 6, 7], "sampling_params": sampling, "stream": True}
    with requests.post(trainer.url + "/generate", json=body, stream=True, timeout=120) as answer:
        assert answer.ok
        yield answer.iter_lines()


@row("no answer", "not known", code=0, serves=None, then_here=GIVEN_UP)
def a_network_that_loses_the_answer(trainer: ServerTrainer) -> Answer:
    """The first bucket is stored; nobody hears of it."""
    with network_that_loses_answers(trainer.url, UPDATE) as url:
        return said_by(lambda: RefitClient(url).update(trainer.new.items(), **SMALL), NoAnswerError)


@row("the iterator broke", code=0, serves=None, then_here=GIVEN_UP)
def a_trainer_whose_iterator_raises(trainer: ServerTrainer) -> Answer:
    def weights():
        for number, item in enumerate(trainer.new.items()):
            if number == 12:
                raise RuntimeError("the iterator broke")
            yield item

    return said_by(lambda: trainer.client().update(weights(), **SMALL), RuntimeError)


@row("at least one tensor", code=0, then=Then.WHOLE)
def a_trainer_without_weights(trainer: ServerTrainer) -> Answer:
    return said_by(lambda: trainer.client().update(iter(())), RefitError)


@row("NaN or Inf", code=0, about=QUERY, serves=None)
def a_trainer_that_diverged(trainer: ServerTrainer) -> Answer:
    """One NaN, in the middle of a whole refit by `RefitClient`."""
    weights = {**trainer.new, **dict([trainer.broken(QUERY, (0, 0), float("nan"))])}
    return said_by(lambda: trainer.client().update(weights.items(), **SMALL), RefitError)
