"""A flattened bucket whose layout points outside of it is refused before a byte is read."""

from types import SimpleNamespace

import pytest
import torch

from sglang_fp8rl.engine.arrival.bucket import FlatBucket, TensorBucket, check_bucket
from sglang_fp8rl.errors import RefitError
from sglang_fp8rl.lab.testing.layouts import to_text
from sglang_fp8rl.wire import layout_text

SHAPE = torch.Size((4, 4))


def tensor(name, start, end, shape=SHAPE, dtype=torch.float32):
    return SimpleNamespace(
        name=name, shape=shape, dtype=dtype, start_idx=start, end_idx=end, numel=end - start
    )


def bucket(*metadata, as_text=False):
    given = to_text(metadata) if as_text else list(metadata)
    return FlatBucket(torch.arange(128, dtype=torch.uint8), given)


@pytest.mark.parametrize("as_text", [False, True])
def test_a_layout_within_the_buffer_is_read(as_text):
    sent = bucket(tensor("b", 64, 128), tensor("a", 0, 64), as_text=as_text)
    assert sent.names == ["b", "a"]
    assert torch.equal(sent.tensor(1).reshape(-1).view(torch.uint8), torch.arange(64).byte())


def test_an_empty_tensor_shares_bytes_with_nobody():
    none = tensor("none", 0, 0, shape=torch.Size((0, 4)))
    assert bucket(none, tensor("a", 0, 64)).names == ["none", "a"]


BAD = {
    "negative, valid as a slice": (tensor("a", -128, -64), "within the bucket"),
    "past the end": (tensor("a", 96, 160), "within the bucket"),
    "end before start": (tensor("a", 64, 0), "as its shape and dtype say"),
    "shorter than its shape": (tensor("a", 0, 60), "as its shape and dtype say"),
    "another dtype's length": (tensor("a", 0, 64, dtype=torch.bfloat16), "as its shape"),
    "not aligned": (tensor("a", 2, 66), "multiple of its element size"),
    "negative sides": (tensor("a", 0, 64, shape=torch.Size((-4, -4))), "as its shape"),
    "longer than any number": (
        tensor("a", 0, 64, shape=torch.Size((1 << 40,) * 2)),
        "as its shape",
    ),
    "beyond any number": (tensor("a", 1 << 70, (1 << 70) + 64), "within the bucket"),
    "overlapping": (tensor("a", 32, 96), "share bytes"),
}


@pytest.mark.parametrize("as_text", [False, True])
@pytest.mark.parametrize("case", BAD)
def test_a_layout_that_points_elsewhere_is_refused_by_name(case, as_text):
    one, rule = BAD[case]
    first = [tensor("first", 0, 64)] if case == "overlapping" else []
    with pytest.raises(RefitError, match=rule) as error:
        bucket(*first, one, as_text=as_text).names  # noqa: B018
    assert error.value.subject == "a"


@pytest.mark.parametrize("wrong", [{"start_idx": "0"}, {"end_idx": None}, {"dtype": "float32"}])
def test_what_is_no_number_is_refused_by_name(wrong):
    one = SimpleNamespace(**{**vars(tensor("a", 0, 64)), **wrong})
    with pytest.raises(RefitError, match=r"whole numbers|dtype of torch") as error:
        bucket(one).names  # noqa: B018
    assert error.value.subject == "a"


UNREADABLE = {
    "{": "JSONDecodeError",
    "[]": "TypeError",
    '{"version":3}': "version 3",
    '{"version":2,"names":["a"],"shapes":[[1]],"dtypes":["float32"],"starts":[0]}': "KeyError: 'ends'",
    '{"version":2,"names":["a"],"shapes":[],"dtypes":[],"starts":[],"ends":[]}': "is shorter",
    '{"version":2,"names":[1],"shapes":[[1]],"dtypes":["float32"],"starts":[0],"ends":[4]}': "expected str",
    '{"version":2,"names":["a"],"shapes":[1],"dtypes":["float32"],"starts":[0],"ends":[4]}': "TypeError",
    '{"version":2,"names":["a"],"shapes":[[1]],"dtypes":["f"],"starts":[0],"ends":[4]}': "KeyError: 'f'",
    '{"version":2,"names":["a"],"shapes":[[1]],"dtypes":["uint8"],"starts":["0"],"ends":[1]}': "TypeError",
    '{"version":2,"names":["a"],"shapes":[["1"]],"dtypes":["uint8"],"starts":[0],"ends":[1]}': "TypeError",
}


@pytest.mark.parametrize("text", UNREADABLE)
def test_a_text_that_is_no_layout_is_refused_with_the_rule(text):
    with pytest.raises(
        RefitError, match="it is JSON of version 2: for each tensor a name"
    ) as error:
        layout_text.from_text(text)
    assert UNREADABLE[text] in error.value.value
    assert error.value.subject == "the layout of a flattened bucket"


def test_a_text_that_is_nested_too_deep_is_no_layout():
    with pytest.raises(RefitError, match=r"RecursionError.*it is JSON of version 2"):
        layout_text.from_text("[" * 100_000)


@pytest.mark.parametrize("odd", [1, 8])
def test_a_buffer_at_an_odd_address_is_read_from_one_that_is_not(odd):
    """A known layout is replayed by address, where the kernels load 16 bytes at once."""
    memory = torch.arange(128 + 16, dtype=torch.uint8)
    start = (odd - memory.data_ptr()) % 16
    sent = FlatBucket(memory[start : start + 128], [tensor("a", 0, 64), tensor("b", 64, 128)])
    assert sent.addresses()[0] % 16 == 0
    assert torch.equal(
        sent.tensor(1).reshape(-1).view(torch.uint8), memory[start + 64 : start + 128]
    )


def test_a_name_that_no_status_could_say_is_refused_in_words_that_can_be_sent():
    with pytest.raises(RefitError) as refused:
        check_bucket(TensorBucket([(name, torch.zeros(1)) for name in ("a", "b\udc80")]))
    str(refused.value).encode()
    with pytest.raises(RefitError) as misplaced:
        bucket(tensor("b\udc80", 0, 1 << 40)).names  # noqa: B018  read by that
    str(misplaced.value).encode()
