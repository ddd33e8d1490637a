"""G6, G7, G8: a full refit through `update_weights_from_tensor`, from the request to the answer."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import measured
import torch

from sglang_fp8rl.errors import Fp8RlError
from sglang_fp8rl.lab.testing.outputs import ask, make_prompts

from .budget import Budget
from .models import Layout, Values, bucket_count
from .servers import OURS, Served

BUCKET_BYTES = 512 << 20  # the same for every server; the client's own choice is measured beside it
FEWEST = 5
WARM_UPS = 2  # the first is recorded, the second is the first to be replayed


class GateError(Fp8RlError):
    """A served result is not what it has to be, so nothing is published of it."""


@dataclass
class Samples:
    """Seconds of each timed refit of one server.

    Attributes:
        request: waiting for the server: every bucket's request, and those of the session.
        end_to_end: the same and what the sender does: copying into buckets, serializing.
        server: of `load_weights`, as the server's status has it; only ours reports it.
        floor: waiting for the server for a refit of its smallest tensor alone.
        stages: of each timed refit, the server's seconds by stage; only ours reports them.
        client_stages: the same of `RefitClient`.
        first: `load_weights` of its first refit, whose layout is learnt.
    """

    request: list[float] = field(default_factory=list)
    end_to_end: list[float] = field(default_factory=list)
    server: list[float] = field(default_factory=list)
    floor: list[float] = field(default_factory=list)
    stages: list[dict[str, float]] = field(default_factory=list)
    client_stages: list[Mapping[str, float]] = field(default_factory=list)
    first: float | None = None
    bucket_bytes: int = 0
    buckets: int = 0
    nbytes: int = 0


def prepare(
    servers: Sequence[Served], values: Values, repetitions: int, tick: Callable[[str], None]
) -> dict[str, Samples]:
    """Refit each server until it replays, and then to the weights of the same seed; nothing of it is timed but the first
    `load_weights` and floors.

    Raises:
        GateError: what a server holds or says after a refit is not what was sent.
    """
    samples = {served.mode.what: Samples() for served in servers}
    prompts = make_prompts(values.layout.vocab_size)
    for served in servers:
        tick(f"first refits of {served.mode.what}")
        samples[served.mode.what].first = _warm_up(served, values, prompts)
        _floors(served, values, samples[served.mode.what], repetitions)
        served.answers = _answers(served, values, _seed(0), Samples(), prompts)
    return samples


def measure(
    servers: Sequence[Served],
    values: Values,
    samples: dict[str, Samples],
    repetitions: int,
    budget: Budget,
    tick: Callable[[str], None],
) -> Iterator[dict[str, Samples]]:
    """Refit prepared servers in turn, again and again: first into `samples`, then with other options. What is done is yielded
    before the next begins, for a run may end early.

    Stops early, after `FEWEST` at least, where less than half of the budget is left.

    Raises:
        GateError: what a server holds or says after a refit is not what was sent.
    """
    prompts = make_prompts(values.layout.vocab_size)
    for repetition in range(repetitions):
        if repetition >= FEWEST and budget.left() < budget.total / 2:
            budget.skipped.append(
                f"{repetitions - repetition} of {repetitions} timed refits: half of the budget of "
                f"{budget.total:.0f} s is kept for what follows; give more with --budget-s"
            )
            break
        for served in servers:
            tick(f"refit of {served.mode.what}")
            _refit(served, values, _seed(repetition), samples[served.mode.what])
    yield samples
    more: dict[str, dict[str, Any]] = {
        "its own buckets": {"bucket_bytes": None},
        "its own buckets, an iterator's": {"bucket_bytes": None, "goes_by": True},
        "verified": {"verify": True},
        "its own buckets, verified": {"bucket_bytes": None, "verify": True},
    }
    for what, options in more.items():
        for served in servers:
            if served.mode == OURS or what == "its own buckets":
                tick(f"refit of {served.mode.what}, {what}")
                yield {f"{served.mode.what}, {what}": _with_options(served, values, options)}
    for served in servers:
        if _answers(served, values, _seed(0), Samples(), prompts) != served.answers:
            raise GateError(
                served.mode.what,
                "other tokens than before the timed refits, for the same weights",
                "a refit to the same weights serves the same",
                f"What was written of it is no result; see {served.server.log_path}.",
            )


def _answers(
    served: Served, values: Values, seed: int, into: Samples, prompts: Sequence[Any]
) -> list[tuple[int, ...]]:
    """Refit to the weights of this seed; the tokens that are served then."""
    _refit(served, values, seed, into)
    return [answer.tokens for answer in ask(served.client, prompts)]


def _warm_up(served: Served, values: Values, prompts: Sequence[Any]) -> float | None:
    """Refit until it is replayed; seconds of the first `load_weights`, if the server reports them."""
    refits = Samples()
    before = None
    for warm_up in range(WARM_UPS):
        after = _answers(served, values, _seed(warm_up), refits, prompts)
        if after == before:
            raise GateError(
                served.mode.what,
                "the same answers before and after a refit with other weights",
                "a refit has to change what is served",
                f"See {served.server.log_path}.",
            )
        before = after
    return refits.server[0] if refits.server else None


def _with_options(served: Served, values: Values, options: Mapping[str, Any]) -> Samples:
    """Refits with other options, behind those that learn and compile."""
    for warm_up in range(WARM_UPS):
        _refit(served, values, _seed(warm_up), Samples(), **options)
    found = Samples()
    for repetition in range(FEWEST):
        _refit(served, values, _seed(repetition), found, **options)
    return found


def compare_answers(one: Served, other: Served) -> None:
    """Two FP8 servers hold the same bytes, whoever quantized: their greedy tokens are equal.

    Raises:
        GateError: they are not.
    """
    if one.answers != other.answers:
        differing = sum(a != b for a, b in zip(one.answers, other.answers, strict=True))
        raise GateError(
            f"{one.mode.what} against {other.mode.what}",
            f"{differing} of {len(one.answers)} greedy answers differ",
            "the same weights in FP8 give the same tokens, whoever quantized them",
            "No number is published; compare the two servers' logs.",
        )


def rows_of(number: str, samples: dict[str, Samples]) -> list[dict[str, Any]]:
    """One row a server; G8 is the same refits with the sender's part."""
    found = []
    for what, one in samples.items():
        kinds = {number: one.request, "G8": one.end_to_end}
        for name, seconds in kinds.items():
            found.append(
                {
                    "id": name,
                    "what": what,
                    **measured.spread(seconds),
                    "server_median_s": statistics.median(one.server) if one.server else None,
                    "first_load_s": one.first,
                    "stages_s": _medians(one.stages),
                    "client_stages_s": _medians(one.client_stages),
                    "request_floor_s": statistics.median(one.floor) if one.floor else None,
                    "bucket_bytes": one.bucket_bytes,
                    "buckets": one.buckets,
                    "bytes": one.nbytes,
                    "repetitions": len(seconds),
                }
            )
    return found


def _medians(stages: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Of each stage; empty where none is reported."""
    names = {name for one in stages for name in one}
    return {
        name: round(statistics.median(one.get(name, 0.0) for one in stages), 6)
        for name in sorted(names)
    }


def _seed(repetition: int) -> int:
    return 1 + repetition % 2


def _refit(
    served: Served,
    values: Values,
    seed: int,
    into: Samples,
    *,
    verify: bool = False,
    goes_by: bool = False,
    bucket_bytes: int | None = BUCKET_BYTES,
) -> None:
    tensors = served.mode.tensors(values, seed)
    _synchronize(values.device)  # making the values is not what is timed
    sent = iter(tensors) if goes_by else tensors
    result = served.client.update(sent, bucket_bytes=bucket_bytes, verify=verify)
    expected = bucket_count(tensors, result.bucket_bytes)
    if (result.tensors, result.buckets) != (len(tensors), expected):
        raise GateError(
            served.mode.what,
            f"{result.tensors} tensors in {result.buckets} buckets were sent",
            f"{len(tensors)} in {expected} are a full refit",
            "This is a mistake of the benchmark.",
        )
    into.request.append(result.server_seconds)
    into.end_to_end.append(result.seconds)
    into.buckets, into.nbytes, into.bucket_bytes = (
        result.buckets,
        result.nbytes,
        result.bucket_bytes,
    )
    into.client_stages.append(result.stages)
    if served.mode.is_ours:
        last = _check_status(served, values.layout)
        into.server.append(last["seconds"])
        into.stages.append(last["stages"])


def _check_status(served: Served, layout: Layout) -> dict[str, Any]:
    """The last refit as our server reports it, if every tensor was in it and all is of one piece."""
    status = served.client.status()
    last = status["last_refit"]
    found = (status["consistent"], last["complete"], last["outcome"], last["tensors"])
    wanted = (True, True, "ok", len(layout.shapes))
    if found != wanted:
        raise GateError(
            served.mode.what,
            f"consistent, complete, outcome, tensors = {found}: {status['problems'][:3]}",
            f"a full refit leaves {wanted}",
            f"No number is published; see {served.server.log_path}.",
        )
    return last


def _floors(served: Served, values: Values, into: Samples, repetitions: int) -> None:
    name = values.layout.smallest()
    for _ in range(repetitions + 1):
        tensor = values.tensor(name, _seed(0))
        _synchronize(values.device)
        result = served.client.update([(name, tensor)], partial=True)
        into.floor.append(result.server_seconds)
    del into.floor[0]  # a new layout: recorded, not replayed


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
