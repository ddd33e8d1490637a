"""A tensor that goes where it did not go when the model was loaded is refused, not stored over another one."""

import pytest
import torch

from sglang_fp8rl.errors import RefitError

pytest.importorskip("sglang")

from tools.census.toys.toy import Toy, loaded, update


class FillsTheHead(Toy):
    """As LFM2 of SGLang: where no head comes, the embedding is the head."""

    names = ("embedding", "head")

    def __init__(self):
        super().__init__()
        for name in FillsTheHead.names:
            setattr(self, name, torch.nn.Parameter(torch.zeros(4), requires_grad=False))

    def load_weights(self, weights):
        sent = dict(weights)
        if "embedding" in sent and "head" not in sent:
            sent["head"] = sent["embedding"]
        super().load_weights(sent.items())


class LoadedWithoutHead(FillsTheHead):
    names = ("embedding",)


def started(kind):
    refit = loaded(kind, 0)
    refit.note_loaded()
    return refit


def send(refit, **values):
    update(refit, {name: torch.full((4,), value) for name, value in values.items()})


def test_an_embedding_alone_does_not_overwrite_a_head_that_was_loaded_by_itself():
    refit = started(FillsTheHead)
    send(refit, head=2.0)
    with pytest.raises(RefitError, match=r"embedding: written into head; .* for embedding"):
        send(refit, embedding=3.0)
    assert refit.model.head.tolist() == [2.0] * 4
    send(refit, embedding=3.0, head=2.0)
    assert (refit.model.embedding.tolist(), refit.model.head.tolist()) == ([3.0] * 4, [2.0] * 4)


def test_an_embedding_that_was_the_head_from_the_start_is_both():
    refit = started(LoadedWithoutHead)
    send(refit, embedding=3.0)
    assert refit.model.head.tolist() == [3.0] * 4
