"""What loaders leave to a table is done before anybody could see that it was not.

The judge is the same model without this package. Its loaders are known from the first update on; the second one is
deferred.
"""

from __future__ import annotations

import threading
from collections import Counter
from contextlib import suppress

import pytest
import torch
from torch import nn

from sglang_fp8rl.engine.arrival.bucket import TensorBucket
from sglang_fp8rl.engine.arrival.update import Origin, Update
from sglang_fp8rl.engine.native import deferred, learned
from sglang_fp8rl.engine.native.deferred import DeferredWrites
from sglang_fp8rl.engine.refit import ModelRefit
from sglang_fp8rl.errors import RefitError
from sglang_fp8rl.numerics import quantize_blockwise
from tools.census.toys.toy import Named, attached, loaded, weights
from tools.random_loading.programs import served_layer

NAMES = ("a", "b", "c")


def load_rows(
    parameter: nn.Parameter,
    tensor: torch.Tensor,
    first: int,
    *,
    is_shifted: bool | None = None,  # a call with a `bool` is not learnt
    doubles: bool | None = None,
    raises: bool | None = None,
    is_doubled: int = 0,
) -> None:
    rows = parameter.data.narrow(0, first + (2 if is_shifted else 0), len(tensor))
    if doubles or raises:
        rows.mul_(2)
        if raises:
            raise ValueError("no more")
    else:
        rows.copy_(tensor)
    if is_doubled:
        rows[3:].copy_(tensor[:3])


class Rows(nn.Module):
    """Three tensors, each the rows of one parameter, and more in a second one."""

    takes_any_order = True

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(18, 4), requires_grad=False)
        self.other = nn.Parameter(torch.zeros(6, 4), requires_grad=False)
        self.w.weight_loader = load_rows
        self.other.weight_loader = load_rows

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return dict.fromkeys(NAMES, (6, 4))

    def load_weights(self, pairs: Named) -> None:
        for name, tensor in pairs:
            self.load(name, tensor)

    def load(self, name: str, tensor: torch.Tensor) -> None:
        self.w.weight_loader(self.w, tensor, 6 * NAMES.index(name))


class Adds(Rows):
    """Computes with what it has just loaded; what is behind the first look does not wait any more."""

    def load(self, name, tensor):
        super().load(name, tensor)
        if name == "a":
            self.other.data.copy_(self.w.data[:6] + 1)


class AddsInPlace(Rows):
    def load(self, name, tensor):
        super().load(name, tensor)
        if name == "b":
            self.w.data[:12].mul_(2)


class Copies(Rows):
    def load(self, name, tensor):
        super().load(name, tensor)
        if name == "a":
            self.other.data.copy_(self.w.data[:6])


class CopiesByALoader(Rows):
    """Of the model's own memory."""

    def load(self, name, tensor):
        super().load(name, tensor)
        if name == "a":
            self.other.weight_loader(self.other, self.w.data[:6], 0)


class Reads(Rows):
    def load(self, name, tensor):
        super().load(name, tensor)
        if name == "a":
            self.other.data.fill_(float(self.w.data[0, 0]))


class AddsBehindAWrite(Rows):
    """Computes with what it wrote past its loader, and then by it: of all that it wrote so far."""

    takes_any_order = False

    def load(self, name, tensor):
        at = 6 * NAMES.index(name)
        self.w.data[at : at + 3].copy_(tensor[3:])
        super().load(name, tensor)
        if name == "a":
            self.other.data.copy_(self.w.data[:6] + 1)


class ReadsBehindAWrite(Rows):
    def load(self, name, tensor):
        at = 6 * NAMES.index(name)
        self.w.data[at : at + 3].copy_(tensor[3:])
        super().load(name, tensor)
        if name == "a":
            self.other.data.fill_(float(self.w.data[0, 0]))


class Moves(Rows):
    """Its parameter has other memory behind the first loader call."""

    def load(self, name, tensor):
        super().load(name, tensor)
        if name == "a":
            self.w.data = self.w.data.clone()


class Binds(Rows):
    """A parameter whose memory is what came, from then on: no operation of torch."""

    def load(self, name, tensor):
        super().load(name, tensor)
        self.other.weight_loader(self.other, tensor, 0)
        if name == "a":
            self.other.data = tensor.view(6, 4)


class GetsNewMemory(Rows):
    """Without an operation on what it had, and computes there."""

    def load(self, name, tensor):
        if name == "a":
            self.w.data = torch.zeros(18, 4)
        super().load(name, tensor)
        if name == "a":
            self.w.data.add_(1)


class BindsThenCopies(Rows):
    """A parameter that is what came: the next one is a copy of what a loader writes there."""

    def load(self, name, tensor):
        if name == "a":
            self.bound = tensor
            self.other.data = tensor.view(6, 4)
        elif name == "b":
            self.other.weight_loader(self.other, tensor, 0)
            self.w.weight_loader(self.w, self.bound, 0)
        else:
            super().load(name, tensor)


class LoadsWithin(Rows):
    """A call within another, of what came first."""

    takes_any_order, is_within = False, False

    def load_weights(self, pairs):
        for name, tensor in pairs:
            self.load(name, tensor)
            if name == "a":
                first = torch.from_numpy(tensor.numpy() * 2)
            if name == "c":
                break
        if not self.is_within:
            self.is_within = True
            self.load_weights([("a", first)])
            self.is_within = False


class WritesTwice(Rows):
    """One loader call writes one place twice."""

    def load(self, name, tensor):
        self.w.weight_loader(self.w, tensor, 6 * NAMES.index(name), is_doubled=1)


class HasAScalar(Rows):
    """Of no dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.scalar = nn.Parameter(torch.zeros(()), requires_grad=False)
        self.scalar.weight_loader = load_scalar

    def shapes(self):
        return super().shapes() | {"scalar": ()}

    def load(self, name, tensor):
        if name == "scalar":
            self.scalar.weight_loader(self.scalar, tensor)
            self.other.data[:1].copy_(tensor.expand(1, 4))
        else:
            super().load(name, tensor)


def load_scalar(parameter: nn.Parameter, tensor: torch.Tensor) -> None:
    parameter.data.copy_(tensor)


class SpoilsWhatCame(Rows):
    def load(self, name, tensor):
        super().load(name, tensor)
        tensor[1:].mul_(2)


class ZeroesWhatCame(Rows):
    def load(self, name, tensor):
        super().load(name, tensor)
        tensor.zero_()


class WritesOver(Rows):
    """Past the loader, to a place that the loader wrote."""

    def load(self, name, tensor):
        super().load(name, tensor)
        self.w.data[:3].copy_(tensor[3:])


class WritesBelow(Rows):
    """By a loader that is run, to a place that one wrote which is not."""

    def load(self, name, tensor):
        self.w.weight_loader(self.w, tensor, 0)
        self.w.weight_loader(self.w, tensor, 0, is_shifted=True)
        super().load(name, tensor)


class DoublesByALoader(Rows):
    """By one that computes with what another wrote."""

    def load(self, name, tensor):
        super().load(name, tensor)
        self.w.weight_loader(self.w, tensor, 6 * NAMES.index(name), doubles=True)


class StopsEarly(Rows):
    """Asks for no tensor behind the last one."""

    def load_weights(self, pairs):
        for name, tensor in pairs:
            self.load(name, tensor)
            if len(self.came) == 2:
                self.came.clear()
                return
            self.came.append(name)

    def __init__(self) -> None:
        super().__init__()
        self.came: list[str] = []


class Overlaps(Rows):
    """All to places that have rows in common."""

    def load(self, name, tensor):
        self.w.weight_loader(self.w, tensor, 2 * NAMES.index(name))


class SamePlace(Rows):
    def load(self, name, tensor):
        self.w.weight_loader(self.w, tensor, 0)


class SharedMemory(Rows):
    """Two parameters of which one is rows of the other."""

    def __init__(self) -> None:
        super().__init__()
        self.other.data = self.w.data[3:9]

    def load(self, name, tensor):
        if name == "c":
            self.other.weight_loader(self.other, tensor, 0)
        else:
            super().load(name, tensor)


class Derives(Rows):
    """Behind its last tensor, or before it asks whether there is another one."""

    def __init__(self) -> None:
        super().__init__()
        self.derived = torch.zeros(18, 4)

    def load_weights(self, pairs):
        for at, (name, tensor) in enumerate(pairs):
            self.load(name, tensor)
            if at == self.last:
                break
        self.post_load_weights()

    last = 99

    def post_load_weights(self) -> None:
        self.derived.copy_(self.w.data * 3)


class DerivesEarly(Derives):
    last = 2


class LooksUnseen(Rows):
    """Behind its last tensor, as a kernel would that is no operation of torch."""

    def load_weights(self, pairs):
        super().load_weights(pairs)
        self.derived = torch.from_numpy(self.w.data.numpy().copy())


class Threads(Rows):
    """Loads in threads that are still at it behind the last tensor."""

    def load_weights(self, pairs):
        threads = []
        for name, tensor in pairs:
            threads.append(threading.Thread(target=self.load, args=(name, tensor)))
        for one in threads:
            one.start()
        for one in threads:
            one.join()
        self.other.data.copy_(self.w.data[6:12])


class Slices(Rows):
    """Loads parts of what came."""

    def load(self, name, tensor):
        for row in range(6):
            part = tensor[5 - row].unsqueeze(0)
            self.w.weight_loader(self.w, part, 6 * NAMES.index(name) + row)


class Turns(Rows):
    """Loads what lies across."""

    def load(self, name, tensor):
        self.w.weight_loader(self.w, tensor.reshape(4, 6).t(), 6 * NAMES.index(name))


KINDS = [
    *(Rows, Adds, AddsInPlace, AddsBehindAWrite, Copies, CopiesByALoader, Reads, ReadsBehindAWrite),
    *(
        Moves,
        Binds,
        GetsNewMemory,
        BindsThenCopies,
        LoadsWithin,
        WritesTwice,
        HasAScalar,
        SpoilsWhatCame,
        ZeroesWhatCame,
    ),
    *(
        WritesOver,
        WritesBelow,
        DoublesByALoader,
        StopsEarly,
        Overlaps,
        SamePlace,
        SharedMemory,
        Derives,
        DerivesEarly,
    ),
    *(LooksUnseen, Threads, Slices, Turns),
]


@pytest.fixture(autouse=True)
def taken(monkeypatch: pytest.MonkeyPatch) -> Counter[bool]:
    """`load_rows` counts as a loader of SGLang's layers. How often a write waited, and how often it could not."""
    monkeypatch.setattr(deferred, "FEWEST", 1)
    monkeypatch.setattr(learned, "_LAYERS", (__name__,))
    found: Counter[bool] = Counter()
    add = DeferredWrites.add

    def counted(self, one):
        waits = add(self, one)
        found[waits] += 1
        return waits

    monkeypatch.setattr(DeferredWrites, "add", counted)
    return found


def send(refit: ModelRefit, pairs: list[tuple[str, torch.Tensor]]) -> None:
    with refit.during(Update(Origin.TENSOR)):
        refit.model.load_weights([(name, one.clone()) for name, one in pairs])


@pytest.mark.parametrize("replay", [False, True], ids=["natively", "replayed"])
@pytest.mark.parametrize("kind", KINDS)
def test_updates_leave_what_the_model_alone_leaves(kind, replay, taken):
    refit, alone = loaded(kind, 0, replay=replay), kind()
    alone.load_weights(iter(weights(alone, 0).items()))
    for seed in range(1, 6):
        pairs = list(weights(alone, seed).items())
        if seed == 3 and kind.takes_any_order:
            pairs.reverse()  # another layout
        send(refit, pairs)
        alone.load_weights(pairs)
        for name in ("w", "other", "derived"):
            one = getattr(alone, name, None)
            assert one is None or torch.equal(getattr(refit.model, name), one), (seed, name)
    # A table can't turn, and has no order; threads begin behind the last tensor.
    assert bool(taken[True]) == (kind not in (Threads, Turns, WritesTwice))
    assert taken[False] or kind is not Threads


def test_what_is_not_finite_keeps_its_rows_and_is_named():
    refit = loaded(Rows, 0, replay=False)
    send(refit, list(weights(refit.model, 1).items()))
    before, sent = refit.model.w.data.clone(), weights(refit.model, 2)
    sent["b"][4, 1] = float("nan")
    with pytest.raises(RefitError, match="b: NaN or Inf in 1 of 6 block"):
        send(refit, list(sent.items()))
    assert torch.equal(refit.model.w.data[10], before[10])
    rest = [at for at in range(18) if at != 10]
    assert torch.equal(refit.model.w.data[rest], torch.cat(list(sent.values()))[rest])


def test_what_went_by_before_an_error_is_stored_and_the_rest_is_named(monkeypatch):
    refit = loaded(Rows, 0, replay=False)
    send(refit, list(weights(refit.model, 1).items()))
    before, sent = refit.model.w.data.clone(), weights(refit.model, 2)
    load = Rows.load

    def raises_at_the_second(self, name, tensor):
        if name == "b":
            raise ValueError("no more")
        load(self, name, tensor)

    monkeypatch.setattr(Rows, "load", raises_at_the_second)
    with pytest.raises(RefitError, match="no more") as found:
        send(refit, list(sent.items()))
    assert "c: not reached" in str(found.value)
    assert "a: " not in str(found.value)
    assert torch.equal(refit.model.w.data, torch.cat([sent["a"], before[6:]]))


def test_what_comes_with_fewer_bits_is_named():
    refit = loaded(Rows, 0, replay=False)
    send(refit, list(weights(refit.model, 1).items()))
    sent = {name: one.bfloat16() for name, one in weights(refit.model, 2).items()}
    closed = []
    refit.extensions[0].closed = closed.append
    send(refit, list(sent.items()))
    assert set(closed[0].narrowed) == set(NAMES)
    assert torch.equal(refit.model.w.data, torch.cat(list(sent.values())).float())


def test_a_loader_that_fails_takes_back_nothing_that_another_wrote(monkeypatch):
    refit = loaded(Rows, 0, replay=False)
    send(refit, list(weights(refit.model, 1).items()))
    load = Rows.load

    def raises_at_the_second(self, name, tensor):
        load(self, name, tensor)
        if name == "b":
            self.w.weight_loader(self.w, tensor, 6, raises=True)

    monkeypatch.setattr(Rows, "load", raises_at_the_second)
    sent = weights(refit.model, 2)
    with pytest.raises(RefitError, match="no more"):
        send(refit, list(sent.items()))
    assert torch.equal(refit.model.w.data[:12], torch.cat([sent["a"], sent["b"]]))


@pytest.mark.parametrize(
    ("kind", "most"), [(Rows, 3), (Overlaps, 1), (SamePlace, 1), (SharedMemory, 1), (Binds, 3)]
)
def test_writes_to_one_place_share_no_table_which_has_no_order(kind, most, monkeypatch):
    refit, sizes = loaded(kind, 0, replay=False), []
    send(refit, list(weights(refit.model, 1).items()))
    made = deferred.CastTable

    def counted(rows, owners):
        sizes.append(len(rows))
        return made(rows, owners)

    monkeypatch.setattr(deferred, "CastTable", counted)
    send(refit, list(weights(refit.model, 2).items()))
    assert max(sizes) == most


def test_a_table_that_fails_is_told_of_all_that_waited_though_the_model_catches_it(monkeypatch):
    refit = loaded(CatchesWhatFails, 0, replay=False)
    send(refit, list(weights(refit.model, 1).items()))
    monkeypatch.setattr(deferred, "make_runner", no_memory)
    with pytest.raises(RefitError, match="out of memory") as found:
        send(refit, list(weights(refit.model, 2).items()))
    for name in ("a", "b"):
        assert f"{name}: RuntimeError: out of memory" in str(found.value)


def test_the_model_s_own_error_is_told_though_the_table_fails_too(monkeypatch):
    refit = loaded(RaisesAtTheSecond, 0, replay=False)
    send(refit, list(weights(refit.model, 1).items()))
    monkeypatch.setattr(deferred, "make_runner", no_memory)
    refit.model.raises = True
    with pytest.raises(RefitError, match="no more") as found:
        send(refit, list(weights(refit.model, 2).items()))
    assert "a: RuntimeError: out of memory" in str(found.value)


class RaisesAtTheSecond(Rows):
    raises = False

    def load(self, name, tensor):
        if self.raises and name == "b":
            raise ValueError("no more")
        super().load(name, tensor)


class CatchesWhatFails(Rows):
    """Computes with what it loaded, and is content where that fails."""

    def load(self, name, tensor):
        super().load(name, tensor)
        if name == "b":
            with suppress(RuntimeError):
                self.other.data.copy_(self.w.data[:6] + 1)


def no_memory(*_args: object, **_options: object) -> None:
    raise RuntimeError("out of memory")


def test_a_write_waits_for_the_table_that_another_thread_runs(monkeypatch):
    begun, goes_on = threading.Event(), threading.Event()
    write, main = DeferredWrites._write, threading.get_ident()

    def slow(self, rows):
        if threading.get_ident() != main:
            begun.set()
            assert not goes_on.wait(0.2)  # the other one has to wait for this
        write(self, rows)

    class Races(Rows):
        is_slow = False

        def load_weights(self, pairs):
            for name, tensor in pairs:
                self.load(name, tensor)
                if name != "a":
                    continue
                thread = threading.Thread(target=lambda: self.other.data.add_(1))
                thread.start()
                assert not self.is_slow or begun.wait(60)
                self.w.weight_loader(self.w, tensor, 0, is_shifted=True)
                goes_on.set()
                thread.join()

    refit, alone = loaded(Races, 0, replay=False), Races()
    for seed in (1, 2):
        if seed == 2:
            goes_on.clear()
            monkeypatch.setattr(DeferredWrites, "_write", slow)
            refit.model.is_slow = True
        pairs = list(weights(alone, seed).items())
        send(refit, pairs)
        alone.load_weights(pairs)
        assert torch.equal(refit.model.w, alone.w)


def test_a_loader_s_error_of_any_kind_is_told_though_the_model_catches_it(monkeypatch):
    refit = loaded(Rows, 0, replay=False)
    load = Rows.load

    def catches(self, name, tensor):
        with suppress(KeyError, RuntimeError):
            load(self, name, tensor)

    monkeypatch.setattr(Rows, "load", catches)
    send(refit, list(weights(refit.model, 1).items()))
    refit.model.w.data = torch.zeros(2, 4)
    with pytest.raises(RefitError, match=r"a: .*refused it"):  # there, it is no part of a table
        send(refit, list(weights(refit.model, 2).items()))
    refit = loaded(Rows, 0, replay=False)
    monkeypatch.setattr(torch.Tensor, "narrow", lambda *_: {}["a dimension"])
    with pytest.raises(RefitError, match="a dimension"):
        send(refit, list(weights(refit.model, 1).items()))


class LongRows(Rows):
    """Of which a table makes several, each refused by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(3, 2**18 + 6), requires_grad=False)
        self.w.weight_loader = load_rows

    def shapes(self):
        return {"a": (1, 2**18 + 6), "b": (2, 2**18 + 6)}

    def load(self, name, tensor):
        self.w.weight_loader(self.w, tensor, NAMES.index(name))


def test_a_row_that_is_not_finite_is_kept_as_a_whole_however_it_is_written(monkeypatch):
    refit = loaded(LongRows, 0, replay=False)
    send(refit, list(weights(refit.model, 1).items()))
    before, sent = refit.model.w.data.clone(), weights(refit.model, 2)
    sent["b"][0, 1] = float("nan")
    for fewest in (1, 3):
        monkeypatch.setattr(deferred, "FEWEST", fewest)
        with pytest.raises(RefitError, match="b: NaN or Inf"):
            send(refit, list(sent.items()))
        assert torch.equal(refit.model.w.data[1], before[1])


class MovesItsScales(nn.Module):
    """Two blocks, and other memory for the scales behind the first."""

    is_moving = False

    def __init__(self) -> None:
        super().__init__()
        self.layer = served_layer(torch.zeros(256, 128), is_fp8=True)
        self.layer.weight.weight_loader = load_rows

    def load_weights(self, pairs):
        for at, (_, tensor) in enumerate(pairs):
            self.layer.weight.weight_loader(self.layer.weight, tensor, 128 * at)
            if self.is_moving and not at:
                self.layer.weight_scale_inv.data = torch.full((2, 1), 7.0)


def test_scales_go_where_they_lie_by_then():
    def pairs(seed: int) -> list[tuple[str, torch.Tensor]]:
        generator = torch.Generator().manual_seed(seed)
        return [(f"{at}.weight", torch.randn(128, 128, generator=generator)) for at in range(2)]

    refit, fresh = attached(MovesItsScales(), replay=False), attached(MovesItsScales())
    refit.model.load_weights(iter(pairs(0)))
    send(refit, pairs(1))
    refit.model.is_moving = True
    send(refit, pairs(2))
    fresh.model.load_weights(iter(pairs(2)))
    scales, expected = (one.model.layer.weight_scale_inv for one in (refit, fresh))
    assert torch.equal(scales[1], expected[1])  # of the first, the model has put 7 there


class ExpertsOfTwoRanks(nn.Module):
    """Two matrices, of which this rank holds one."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = served_layer(torch.zeros(256, 128), is_fp8=True)
        self.layer.weight.weight_loader = load_expert

    def load_weights(self, pairs):
        for name, tensor in pairs:
            self.layer.weight.weight_loader(self.layer.weight, tensor, int(name[0]))


def load_expert(parameter: nn.Parameter, tensor: torch.Tensor, expert: int) -> None:
    if expert == 0:
        parameter.data.copy_(tensor)


def test_the_pair_of_an_expert_of_another_rank_is_a_pair():
    refit, generator = attached(ExpertsOfTwoRanks(), replay=False), torch.Generator().manual_seed(0)

    def pairs() -> Named:
        for expert in "01":
            codes, scale = quantize_blockwise(torch.randn(256, 128, generator=generator))
            yield from ((f"{expert}.weight", codes), (f"{expert}.weight_scale_inv", scale))

    refit.model.load_weights(iter(list(pairs())))
    for _ in range(2):
        sent = list(pairs())
        send(refit, sent)
        codes, scale = dict(sent)["0.weight"], dict(sent)["0.weight_scale_inv"]
        layer = refit.model.layer
        assert torch.equal(layer.weight.view(torch.uint8), codes.view(torch.uint8))
        assert torch.equal(layer.weight_scale_inv, scale)


class BindsOneOfTwo(Rows):
    """A parameter that is what came first, whose memory the sender has under another name too."""

    binds = False

    def load(self, name, tensor):
        if name == "a" and self.binds:
            self.other.data = tensor.view(6, 4)
        elif name == "c":
            self.other.weight_loader(self.other, tensor, 0)
        else:
            super().load(name, tensor)


def test_of_tensors_that_share_memory_the_copy_is_what_waits():
    refit = loaded(BindsOneOfTwo, 0, replay=False)
    send(refit, list(weights(refit.model, 1).items()))
    refit.model.binds = True
    sent = weights(refit.model, 2)
    shared, expected = sent["a"], sent["a"].clone()
    with refit.during(Update(Origin.TENSOR)):
        refit.model.load_weights([("a", shared), ("c", sent["c"]), ("b", shared)])
    assert torch.equal(refit.model.w.data[6:12], expected)
    assert torch.equal(refit.model.other.data, sent["c"])


def test_writes_one_by_one_ask_once_where_the_bucket_lies(monkeypatch):
    refit, asked = loaded(SamePlace, 0, replay=False), []
    send(refit, list(weights(refit.model, 1).items()))
    addresses = TensorBucket.addresses
    monkeypatch.setattr(
        TensorBucket, "addresses", lambda self: asked.append(self) or addresses(self)
    )
    send(refit, list(weights(refit.model, 2).items()))
    assert len(asked) == 1
