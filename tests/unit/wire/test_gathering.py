"""Tensors that are copied together lie as those that are copied one by one, whatever their memory looks like."""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Mapping

import numpy as np
import pytest
import torch
from torch.autograd import forward_ad

from sglang_fp8rl.errors import RefitError
from sglang_fp8rl.wire import layout_text
from sglang_fp8rl.wire.bucket import Bucket, buckets_of
from sglang_fp8rl.wire.listed import Listed
from sglang_fp8rl.wire.sendable import sendable
from sglang_fp8rl.wire.staging import COUNT, StagingBuffers

aten = torch.ops.aten


def at_an_odd_address(count):
    """FP32 values whose storage begins where no word does."""
    raw = np.zeros(4 * count + 4, np.uint8)
    shifted = raw[(4 - raw.ctypes.data) % 8 :][: 4 * count]  # four bytes behind a word's start
    values = torch.from_numpy(shifted).view(torch.float32)
    return values.copy_(torch.arange(count, dtype=torch.float32))


def behind_an_odd_start(count):
    """FP32 values on a word's start, in a storage that does not begin on one."""
    raw = np.zeros(4 * count + 16, np.uint8)
    shift = (4 - raw.ctypes.data) % 8
    return torch.from_numpy(raw[shift:])[4 : 4 + 4 * count].view(torch.float32).fill_(7)


class Wrapped(torch.Tensor):
    """Has no memory of its own: what reads its FP32 values is given what it holds, in another dtype."""

    @staticmethod
    def __new__(cls, held):
        made = torch.Tensor._make_wrapper_subclass(cls, held.shape, dtype=torch.float32)
        made.held = held
        return made

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        given = [one.held if isinstance(one, cls) else one for one in args]
        found = func(*given, **(kwargs or {}))
        return cls(found) if func in (aten.detach.default, aten.clone.default) else found


def kinds(draw):
    """One tensor of each kind of memory, and of each dtype and length that is no whole word."""
    n = draw.randrange(1, 9)
    values = torch.arange(8 * n, dtype=torch.float32)
    yield values.clone()
    yield torch.nn.Parameter(values.clone())
    yield values.bfloat16()
    yield values.to(torch.float8_e4m3fn)
    yield values[: 2 * n + 1].clone()
    yield values.bfloat16()[1 : 4 * n + 1]
    yield values.view(4, -1).t()
    yield values.view(4, -1)[:, : n or 1]
    yield values[:1].expand(4, 2)
    yield torch.complex(values, values).conj()
    yield torch.complex(values, values).conj().imag
    yield values[:0].view(0, 4)
    yield torch.empty(0, 5)[:, 0]
    yield torch.ones(14, dtype=torch.complex128)[::7][:1]
    yield Wrapped(values.double())
    yield torch.tensor(float(n))
    yield values.to(torch.uint8)[:3]
    yield at_an_odd_address(8 * n)
    yield behind_an_odd_start(8 * n)


def bits(tensor):
    return tensor.contiguous().as_strided((tensor.numel(),), (1,)).view(torch.uint8)


@pytest.mark.parametrize("expected", [0, 100, 1 << 19])
@pytest.mark.parametrize("staging", [None, StagingBuffers()])
def test_any_order_of_any_tensors_lies_as_if_each_was_copied_by_itself(staging, expected):
    draw = random.Random(0)
    for _ in range(10 * COUNT):
        tensors = [one for _ in range(3) for one in kinds(draw)]
        draw.shuffle(tensors)
        bucket = Bucket(1 << 20, expected, staging)
        for at, one in enumerate(tensors):
            bucket.add(str(at), one)
        bucket.close(is_last=True)
        check(bucket, tensors)
        listed = Listed([(str(at), one) for at, one in enumerate(tensors)])
        ((together, _),) = listed.buckets(1 << 20, staging)
        check(together, tensors)
        assert together.layout == bucket.layout


@pytest.mark.parametrize("dtype", layout_text.DTYPES)
def test_any_bits_of_any_dtype_stay_what_they_are(dtype):
    """Payloads of NaN, numbers below the smallest normal one."""
    raw = torch.randint(0, 256, (3, 64), dtype=torch.uint8)
    raw[0], raw[1] = 255, 1
    tensors = [one.clone().view(layout_text.DTYPES[dtype]) for one in raw]
    tensors.append(torch.ones(4))
    ((bucket, _),) = Listed([(str(at), one) for at, one in enumerate(tensors)]).buckets(1 << 20)
    assert torch.equal(bucket.flat[: raw.numel()], raw.view(-1))
    ((bucket, _),) = Listed([(str(at), one) for at, one in enumerate(tensors[:3])]).buckets(1 << 20)
    assert torch.equal(bucket.flat, raw.view(-1))


def check(bucket, tensors):
    for at, tensor in enumerate(tensors):
        name, found = bucket.tensor(at)
        sent = getattr(tensor, "held", tensor).detach().to(found.dtype)
        assert (name, found.dtype, found.shape) == (str(at), tensor.dtype, tensor.shape)
        assert torch.equal(bits(found), bits(sent.resolve_conj().resolve_neg()))


@pytest.mark.parametrize("limit", [0, 1, 40, 300, 4096, 1 << 20])
def test_a_list_is_cut_where_an_iterator_is(limit):
    """At the same places, with the same layouts and bytes: a server replays either."""
    draw = random.Random(limit)
    for _ in range(5):
        sent = []
        for at in range(draw.randrange(1, 30)):
            sent.append((f"{at}.weight", torch.rand(draw.randrange(0, 40))))
            if draw.random() < 0.5:
                sent.append((f"{at}.weight_scale_inv", torch.rand(draw.randrange(0, 9))))
            if draw.random() < 0.2:  # of the one before that
                sent.append((f"{at - 1}.weight_scale", torch.rand(3)))
        apart = list(buckets_of(sendable(iter(sent)), limit))
        listed = list(Listed.of(sent).buckets(limit))
        for (one, is_last), (other, is_its_last) in zip(listed, apart, strict=True):
            assert (one.layout, is_last) == (other.layout, is_its_last)
            assert torch.equal(one.flat, other.flat)
            assert one.payload(1, False).nbytes == other.payload(1, False).nbytes


def test_a_list_is_one_bucket_below_any_limit():
    sent = [(str(at), torch.ones(9)) for at in range(3)]
    assert [is_last for _, is_last in Listed.of(sent).buckets(10**20)] == [True]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda one: one.untyped_storage().resize_(0), "freed by now"),
        (lambda one: one.set_(torch.ones(8)), r"float32 \(8,\) by now"),
        (lambda one: one.set_(torch.ones(4, 4)), r"float32 \(4, 4\) by now"),
        (lambda one: setattr(one, "data", torch.ones(32).bfloat16()), r"bfloat16 \(32,\) by now"),
    ],
    ids=["freed", "smaller", "another shape", "another dtype"],
)
def test_what_changes_behind_the_first_bucket_is_refused_and_named(change, said):
    """To read what is freed would end the process; of what is smaller, old bytes would be sent."""
    sent = [(str(at), torch.ones(16)) for at in range(4)]
    buckets = Listed.of(sent).buckets(128)
    next(buckets)
    change(sent[3][1])
    with pytest.raises(RefitError, match=f"^3: .*{said}"):
        next(buckets)


def test_what_has_a_tangent_is_its_values():
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(torch.ones(16), torch.ones(16))
        sent = [("a", dual), ("b", torch.ones(16)), ("c", dual[:3])]
        ((bucket, _),) = Listed.of(sent).buckets(1 << 20)
        for at, (_, tensor) in enumerate(sent):
            found = bucket.tensor(at)[1]
            assert torch.equal(found, torch.ones(len(tensor)))
            assert forward_ad.unpack_dual(found).tangent is None


def test_what_stays_is_copied_by_close_and_what_goes_by_when_it_is_added():
    tensor, bucket = torch.ones(64), Bucket(1 << 20)
    bucket.add("w", tensor)
    buckets = Listed([("w", tensor)]).buckets(1 << 20)
    tensor.fill_(2)
    bucket.close(is_last=True)
    ((listed, _),) = buckets
    tensor.fill_(3)
    assert [set(one.tensor(0)[1].tolist()) for one in (bucket, listed)] == [{1.0}, {2.0}]


def test_many_tensors_are_few_calls(monkeypatch):
    calls, cat = [], torch.cat
    monkeypatch.setattr(torch, "cat", lambda *a, **k: calls.append(len(a[0])) or cat(*a, **k))
    weights = {str(n): torch.ones(32, 32) for n in range(100)} | {"odd": torch.ones(3)}
    for bucket, _ in Listed.of(weights.items()).buckets(1 << 30):
        assert [bool((bucket.tensor(at)[1] == 1).all()) for at in range(101)] == [True] * 101
    assert calls == [100]


class MadeWhenAsked(Mapping):
    """Weights that are read into the same memory, one after the other."""

    def __init__(self):
        self._memory = torch.zeros(64)

    def __getitem__(self, name):
        return self._memory.fill_(float(name))

    def __iter__(self):
        return iter("123")

    def __len__(self):
        return 3


def test_tensors_of_collections_alone_are_all_there():
    weights = {"a": torch.ones(3)}
    there = [weights.items(), OrderedDict(weights).items(), list(weights.items())]
    there += [(("a", torch.ones(1)),), torch.nn.Linear(2, 2).state_dict().items()]
    assert all(map(Listed.of, there))
    module = torch.nn.Linear(2, 2)
    for other in (
        iter(weights.items()),
        module.named_parameters(),
        MadeWhenAsked().items(),
        reversed(list(weights.items())),
    ):
        assert Listed.of(other) is None


def freed():
    tensor = torch.ones(2)
    tensor.untyped_storage().resize_(0)
    return tensor


@pytest.mark.parametrize(
    "odd",
    [
        ("a", torch.ones(2)),
        (1, torch.ones(2)),
        ["b", torch.ones(2)],
        ("b", torch.ones(2), 3),
        ("b", 1.0),
        ("b", Wrapped(torch.ones(2))),
        ("b", torch.ones(2, device="meta")),
        ("b", torch.ones(2, 2).to_sparse()),
        ("b", torch.empty(2, dtype=torch.bits8)),
        ("b", freed()),
    ],
    ids=[
        "again",
        "no text",
        "a list",
        "three",
        "no tensor",
        "wrapped",
        "meta",
        "sparse",
        "dtype",
        "freed",
    ],
)
def test_one_that_has_to_be_looked_at_by_itself_is(odd):
    assert Listed.of([("a", torch.ones(2)), odd]) is None


@pytest.mark.parametrize("empty", [[], (), {}.items()], ids=str)
def test_nothing_is_no_list_of_tensors(empty):
    assert Listed.of(empty) is None
