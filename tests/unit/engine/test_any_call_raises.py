"""Whatever call of ours raises between a request and its answer, on whichever rank: every rank answers, the answer
is a failed one, and the next full update mends what it left. The model is a toy, its ranks are threads."""

from __future__ import annotations

import gc
import logging
import threading
import weakref
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
from support.engine.injection import INJECTED, injected, traced
from support.replayed import replay_of
from support.threads_as_ranks import Ranks

from tools.census.toys.going_wrong import Raising, RaisingInAPool, give_a_constant
from tools.census.toys.toy import Toy, check_same, loaded, weights

pytest.importorskip("sglang")

from sglang_fp8rl.engine.extension import Extension
from sglang_fp8rl.engine.host.metrics import _metrics
from sglang_fp8rl.engine.host.status import add_status
from sglang_fp8rl.engine.host.updater import RefitUpdater
from sglang_fp8rl.engine.law.law import law_of
from sglang_fp8rl.engine.law.log import MAX_LISTED

io_struct = pytest.importorskip("sglang.srt.managers.io_struct")
pytestmark = pytest.mark.skipif(
    not hasattr(io_struct, "BeginWeightUpdateReqInput"), reason="this SGLang has no sessions"
)

SIZE = 2
ONE_AT_A_TIME = (
    threading.Lock()
)  # ranks are processes: in one, what one loads another would observe


class Host:
    """What SGLang's weight updater does around a model, with its barriers."""

    def barrier(self):
        torch.distributed.barrier(group=self.tp_cpu_group)

    def begin_weight_update(self, request):
        self._session = request
        self.barrier()
        return io_struct.BeginWeightUpdateReqOutput(success=True, message="")

    def end_weight_update(self, request):
        self._session = None
        self.barrier()
        return io_struct.EndWeightUpdateReqOutput(success=True, message="")

    def update_weights_from_tensor(self, request):
        """The target's tensors, or those of a draft that shares them."""
        with ONE_AT_A_TIME:
            model = self.refit.model
            if request.selector != "draft":
                model.load_weights(request.tensors)
            else:
                for name, tensor in request.tensors:
                    parameter = dict(model.named_parameters())[name]
                    parameter.weight_loader(parameter, tensor)
        if request.flush_cache:
            self.flush_cache()
        self.barrier()
        return io_struct.UpdateWeightsFromTensorReqOutput(success=True, message="")

    def update_weights_from_ipc(self, request):
        """A checkpoint engine's request brings several buckets."""
        with ONE_AT_A_TIME:
            for bucket in request.buckets:
                self.refit.model.load_weights(bucket)
        if request.flush_cache:
            self.flush_cache()
        self.barrier()
        return io_struct.UpdateWeightsFromIPCReqOutput(success=True, message="")

    def update_weights_from_disk(self, request):
        """What failed is loaded from the old path again, while its error still holds it all."""
        sent, text = iter(request.tensors), ""
        with ONE_AT_A_TIME:
            try:
                self.refit.model.load_weights(sent)
            except Exception as error:  # noqa: BLE001 as SGLang's
                text = f"Failed to update weights: {error}"
                del sent
                gc.collect()
                self.refit.model.load_weights(iter(tensors(0)))
        return io_struct.UpdateWeightFromDiskReqOutput(success=not text, message=text)

    def check_weights(self, request):
        self.barrier()
        if request.action == "compare":
            raise RuntimeError("no snapshot was taken")
        return io_struct.CheckWeightsReqOutput(success=True, message="")


class Manager(RefitUpdater):
    """One rank of it, under our hooks."""

    def __init__(self, refit, group):
        self.refit, self.tp_cpu_group = refit, group
        refit.model.fp8rl_refit = refit
        dtype = torch.bfloat16  # of the cache
        runner = SimpleNamespace(model=refit.model, token_to_kv_pool=None, kv_cache_dtype=dtype)
        refit.extensions[:] = [one for one in refit.extensions if one.start(runner)]
        self.tp_worker = SimpleNamespace(model_runner=runner)
        self.draft_worker = self.metrics_collector = self._session = self.scheduler = None
        self.offload_tags = set()
        self.weight_updater, self.ps = self, SimpleNamespace(dp_rank=0)
        self.flush_cache = lambda **_: True

    def state(self, mark=None):
        result = add_status(
            SimpleNamespace(internal_state={}), self, SimpleNamespace(rid=mark)
        ).internal_state
        return result.get("fp8rl", result)


class Server:
    """Two ranks of a toy model, on its first weights."""

    def __init__(self, monkeypatch, kind=Toy):
        monkeypatch.setattr(
            f"{add_status.__module__}.RANKS_ARE_GLOBAL", False
        )  # nobody wrote them in this process
        for name, method in vars(Host).items():
            if callable(method):
                monkeypatch.setattr(RefitUpdater.__mro__[1], name, method, raising=False)
        self.ranks = Ranks(SIZE, monkeypatch)
        self.managers = [Manager(loaded(kind, 0), group) for group in self.ranks.groups]

    def call(self, act, *, name="", at=0):
        """`act(manager)` on every rank; with a name, its first call on rank `at` raises."""

        def run(rank):
            manager = self.managers[rank]
            return injected(name, act, manager) if name and rank == at else act(manager)

        return self.ranks.call(run)


def tensors(seed, part=slice(None)):
    return list(weights(Toy(), seed).items())[part]


def from_tensors(manager, sent, flush=True):
    request = SimpleNamespace(
        serialized_named_tensors=[b""] * SIZE,
        tensors=sent,
        load_format=None,
        flush_cache=flush,
        selector="all",
        rid=None,
    )
    return manager.update_weights_from_tensor(request)


def update(seed=1, part=slice(None), flush=True):
    return lambda manager: from_tensors(manager, tensors(seed, part), flush)


def from_disk(manager, sent=None):
    sent = tensors(1) if sent is None else sent
    return manager.update_weights_from_disk(SimpleNamespace(tensors=sent, rid=None))


def begin(manager):
    return manager.begin_weight_update(io_struct.BeginWeightUpdateReqInput())


def end(manager):
    return manager.end_weight_update(io_struct.EndWeightUpdateReqInput())


def check(manager):
    return manager.check_weights(io_struct.CheckWeightsReqInput(action="checksum"))


def compare(manager):
    return manager.check_weights(io_struct.CheckWeightsReqInput(action="compare"))


class Folding(Extension):
    """Can't fold the weights again."""

    @contextmanager
    def unfolded(self):
        yield
        raise RuntimeError("left unfolded")


def asked(mark):
    def act(manager):
        state = manager.state(mark)
        error = next((state[key] for key in state if key.endswith("_error")), "")
        return SimpleNamespace(success=not error, message=error)

    return act


def status(manager):
    state = manager.state()
    is_read = "served" in state
    return SimpleNamespace(success=is_read, message="" if is_read else " ".join(state["problems"]))


# Name: what comes before, and the request in which a call raises.
REQUESTS = {
    "update": ((), update()),
    "replayed": ((update(0), update(1), update(0)), update(1)),
    "bucket": ((), update(1, slice(1), flush=False)),
    "disk": ((), from_disk),
    "begin": ((), begin),
    "in a session": ((begin,), update(1, slice(1))),
    "end": ((begin, update(1)), end),
    "end of half": ((begin, update(1, slice(1))), end),
    "empty end": ((begin,), end),
    "status": ((update(1, slice(1), flush=False),), status),
    "fingerprint": ((), asked("fp8rl-fingerprint")),
    "check": ((), check),
}
OF_ONE_RANK = {"status", "fingerprint"}  # the rank that was asked answers


def mended(server):
    """What is wrong after a full update behind it all; empty if nothing is."""
    if server.managers[0]._session is not None:
        server.call(end)
    answers = server.call(update(2))
    if not all(one.success for one in answers):
        return f"a full update is refused: {answers}"
    fresh = loaded(Toy, 2)
    for manager in server.managers:
        check_same(manager.refit, fresh)
        if manager.state()["state"] != "whole":
            return f"{manager.state()['state']}: {manager.state()['problems']}"
    return ""


def wrong(server, request, name, at):
    before, act = REQUESTS[request]
    for manager in server.managers:
        replay_of(manager.refit).__init__(manager.refit)  # as when its calls were traced
        for extension in manager.refit.extensions:
            vars(extension).pop("made", None)
    for one in before:
        assert all(answer.success for answer in server.call(one))
    answers = server.call(act, name=name, at=at)
    told = [answers[at]] if request in OF_ONE_RANK else answers
    for one in told:
        if one.success or INJECTED not in one.message:
            return f"answered {one}"
    if act not in (begin, check, end) and request not in OF_ONE_RANK:
        states = [manager.state()["state"] for manager in server.managers]
        if states != ["failed"] * SIZE:
            return f"states {states}"
    if act is end and any(manager.state()["state"] == "whole" for manager in server.managers):
        return "whole"
    return mended(server)


WRONG = {
    "a shape": (Toy, {"a.weight": torch.ones(7, 4)}),
    "a NaN": (Toy, {"a.weight": torch.full((6, 4), torch.nan)}),
    "no values": (Toy, {"a.weight": torch.ones(6, 4, device="meta")}),
    "a name": (Toy, {"c.weight": torch.ones(6, 4)}),
    "its loader raises": (Raising, {"b.weight": torch.full((6, 4), 101.0)}),
    "a thread of its raises": (RaisingInAPool, {"b.weight": torch.full((6, 4), 101.0)}),
    "a standing refusal": (Toy, {}),
}


@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("act", [from_tensors, from_disk])
def test_of_a_refused_bucket_nothing_is_kept_behind_the_answer(monkeypatch, wrong, act):
    # pytest keeps what is logged.
    monkeypatch.setattr(logging.root.manager, "disable", logging.CRITICAL)
    kind, bad = WRONG[wrong]
    server, sent = Server(monkeypatch, kind), []
    for manager in server.managers if not bad else ():
        give_a_constant(manager.refit)
        manager.refit.model.constant[0], manager.refit.runner.forward_pass_id = 9, 1

    def refused(manager):
        tensors = weights(Toy(), 1) | bad
        sent.extend(weakref.ref(one) for name, one in tensors.items() if name not in bad)
        return act(manager, list(tensors.items()))

    gc.disable()
    try:
        assert not any(one.success for one in server.call(refused))
    finally:
        gc.enable()
    assert sent
    assert all(one() is None for one in sent)


def test_a_read_that_fails_leaves_the_weights_what_they_were(monkeypatch):
    server = Server(monkeypatch)
    for _ in range(MAX_LISTED + 2):
        answers = server.call(compare)
        assert not any(one.success for one in answers)
        assert all("no snapshot" in one.message for one in answers)
    assert [one.state()["state"] for one in server.managers] == ["whole"] * SIZE


def test_a_read_behind_which_weights_are_left_otherwise_fails_them(monkeypatch):
    server = Server(monkeypatch)
    server.managers[1].refit.extensions.append(Folding(server.managers[1].refit))
    for _ in range(MAX_LISTED + 2):
        assert not any(one.success for one in server.call(check))
    for manager in server.managers:
        assert manager.state()["state"] == "failed"
        assert len(law_of(manager.refit).log.failures) <= MAX_LISTED
    server.managers[1].refit.extensions.pop()
    assert mended(server) == ""


def test_a_call_is_counted_as_it_is_answered(monkeypatch):
    """What the old weights left in storage can't be cleared on one rank, behind all that the request did."""
    registry = pytest.importorskip("prometheus_client").REGISTRY
    server = Server(monkeypatch)
    labels = [{"model_name": f"rank {at}"} for at in range(SIZE)]
    _metrics(tuple(labels[0]))  # of a process, and ranks are threads here
    for manager, own in zip(server.managers, labels, strict=True):
        manager.metrics_collector = SimpleNamespace(labels=own)
    answers = server.call(update(), name="host.flush:clear_stored_cache", at=1)
    assert not any(one.success for one in answers)
    for own in labels:
        failed, ok = (
            registry.get_sample_value(
                "sglang:fp8rl_update_calls_total", {**own, "source": "tensor", "outcome": outcome}
            )
            for outcome in ("failed", "ok")
        )
        assert (failed, ok) == (1, None)


def spread(names, count):
    """So many of them, from the first to the last."""
    step = max(1, len(names) / count)
    return [names[int(at * step)] for at in range(min(count, len(names)))]


@pytest.mark.parametrize("at", [1, pytest.param(0, marks=pytest.mark.slow)])
@pytest.mark.parametrize("request_name", REQUESTS)
def test_every_call_may_raise_on_any_rank(monkeypatch, request_name, at, request):
    server = Server(monkeypatch)
    before, act = REQUESTS[request_name]
    for one in before:
        server.call(one)
    names = server.call(lambda manager: traced(act, manager)[1])[at]
    assert mended(server) == ""
    assert names
    names = spread(names, 8 if request.config.getoption("--all") else 3)
    broken = {}
    for name in names:
        try:
            found = wrong(server, request_name, name, at)
        except Exception as error:  # noqa: BLE001  all of them are shown
            found = f"no answer: {type(error).__name__}: {error}"
        if found:
            broken[name] = found
            server = Server(monkeypatch)
    assert broken == {}
