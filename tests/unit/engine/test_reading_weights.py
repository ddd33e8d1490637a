"""Who reads served weights, or spoils them, through SGLang's own requests: told apart, and named."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from support.threads_as_ranks import Ranks

pytest.importorskip("sglang")

from sglang_fp8rl.engine.host import updater
from sglang_fp8rl.engine.law.law import law_of
from sglang_fp8rl.engine.proof.extension import Fingerprints
from tools.census.toys.toy import Toy, loaded, update, weights


@pytest.mark.parametrize(
    ("selector", "lost"),
    [("all", (True, True)), ("target", (True, False)), ("draft", (False, True)), (None, (True, True))],
)  # fmt: skip
def test_what_is_reset_is_missing_until_it_came(monkeypatch, selector, lost):
    """Older SGLang has no selector there, and resets all."""
    drafts: list[None] = []
    monkeypatch.setattr(updater, "lose_drafts", lambda: drafts.append(None))
    (group,) = Ranks(1, monkeypatch).groups
    refit = loaded(Toy, 0)
    manager = SimpleNamespace(
        tp_worker=SimpleNamespace(model_runner=SimpleNamespace(model=refit.model)),
        tp_cpu_group=group,
        offload_tags=set(),
        metrics_collector=None,
    )
    request = SimpleNamespace(action="reset_tensors")
    if selector is not None:
        request.selector = selector
    assert updater._read_unfolded(lambda _: "reset", manager, request) == "reset"
    assert (law_of(refit).log.is_unloaded, bool(drafts)) == lost


@pytest.mark.parametrize("shape", [(2, 3, 4), (3, 8), (24,)])
def test_what_lies_in_another_layout_between_updates_has_no_number_and_says_why(shape):
    """SGLang's TRT-LLM runner keeps BF16 experts in blocks while it serves."""
    refit = loaded(Toy, 0)
    refit.note_loaded()
    update(refit, weights(refit.model, 1))
    refit.model.a.weight.data = refit.model.a.weight.data.reshape(shape).clone()
    held = Fingerprints(refit).rank().held
    assert held["a.weight"].reason == "between updates SGLang keeps it in another layout"
    assert not held["b.weight"].reason
