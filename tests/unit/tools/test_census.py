"""The census finds what is silent, and goes on whatever a class does."""

from __future__ import annotations

import json
import os
import signal
import time
from types import SimpleNamespace

import pytest
import torch
from torch import nn

pytest.importorskip("sglang")

from support.small_class import Builder, Plain

from sglang_fp8rl.engine.refit import refit_of
from sglang_fp8rl.errors import ConfigError, RefitError
from tools.census import families, forward, judge, page, results
from tools.census.classes import matching
from tools.census.configs import config_class_of, tiny_config
from tools.census.host import has_a_number
from tools.census.judge import Judge, judged
from tools.census.layers import lost
from tools.census.names import Sent, called
from tools.census.outcome import OUT_OF_TIME, Row, summary
from tools.census.overrides import radix_cache
from tools.census.ranks import run_forked
from tools.census.tiny import shrink
from tools.census.towers import cut_blocks, cut_config


class First(Plain):
    """Keeps a number of its first load, of which torch sees nothing."""

    def load_weights(self, weights):
        weights = list(weights)
        if not hasattr(self, "first"):
            self.first = float(memoryview(weights[0][1].numpy().tobytes()).cast("f")[0])
        super().load_weights(iter(weights))


class Unseen(Plain):
    """Its first load writes memory past every operation that an observer sees."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.zeros(6), persistent=False)

    def load_weights(self, weights):
        weights = dict(weights)
        if not self.table.numpy().any():
            self.table.numpy()[:] = weights["a.bias"].numpy()
        super().load_weights(iter(weights.items()))


class Impossible(Plain):
    def __init__(self) -> None:
        raise ImportError("No module named 'of_somebody_else'")


@pytest.fixture(autouse=True)
def any_algorithm():
    yield
    torch.use_deterministic_algorithms(False)


def test_copies_are_replayed_and_not_silent():
    row = judged("Plain", Builder(Plain))
    assert (row.kind, row.names, row.silent, row.reasons) == ("replayed", 2, [], [])
    assert not row.is_proven  # by bytes alone


@pytest.mark.parametrize(("kind", "place"), [(First, ".first"), (Unseen, "table")])
def test_what_differs_from_a_fresh_load_is_silent(kind, place):
    row = judged(kind.__name__, Builder(kind))
    assert place in row.silent
    assert summary([row]).endswith("; 1 silent")


class Pairs(Plain):
    """Its weight is served times its bias, which it only knows where both come in one call."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("product", torch.zeros(6, 4), persistent=False)

    def load_weights(self, weights):
        weights = dict(weights)
        if weights.keys() == {"a.weight", "a.bias"}:
            self.product.copy_(weights["a.weight"]).mul_(weights["a.bias"][:, None])
        super().load_weights(iter(weights.items()))


def test_what_only_holds_for_tensors_of_one_call_is_silent_where_they_are_parted():
    row = judged("Pairs", Builder(Pairs))
    assert "product (parted)" in row.silent
    assert not row.is_parted


def test_a_class_that_takes_its_tensors_only_together_is_told():
    class Whole(Plain):
        def load_weights(self, weights):
            weights = dict(weights)
            if len(weights) < 2:
                raise ValueError("some weights are missing")
            super().load_weights(iter(weights.items()))

    row = judged("Whole", Builder(Whole))
    assert (row.kind, row.silent) == ("replayed", [])
    assert "some weights are missing" in row.whole_only
    assert not row.is_parted
    assert judged("Plain", Builder(Plain)).is_parted


def test_names_with_and_without_language_model_leave_the_same_bytes():
    class Nested(Plain):
        def __init__(self) -> None:
            super().__init__()
            self.language_model = nn.Linear(4, 6)
            self.language_model.requires_grad_(False)
            del self.a

        def load_weights(self, weights):
            both = ((name.replace("language_model.", ""), one) for name, one in weights)
            super().load_weights((f"language_model.{name}", one) for name, one in both)

    row = judged("Nested", Builder(Nested))
    assert (row.kind, row.other_names, row.silent) == ("replayed", True, [])
    assert not judged("Plain", Builder(Plain)).other_names


def test_with_the_observer_off_a_class_that_computes_is_silent(monkeypatch):
    from sglang_fp8rl.engine.arrival.sent_tensors import SourceIndex

    class Computes(Plain):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("twice", torch.zeros(6), persistent=False)

        def load_weights(self, weights):
            weights = dict(weights)
            self.twice.copy_(weights["a.bias"]).mul_(2)
            super().load_weights(iter(weights.items()))

    assert judged("Computes", Builder(Computes)).silent == []
    monkeypatch.setattr(SourceIndex, "leave_native", lambda *_: None)
    assert "twice" in judged("Computes", Builder(Computes)).silent


class Fussy(Plain):
    """Takes no `a.bias` by itself; the rest is well over three quarters of it."""

    def __init__(self) -> None:
        super().__init__()
        for name in "bcde":
            self.register_parameter(name, nn.Parameter(torch.zeros(3), requires_grad=False))

    def load_weights(self, weights):
        weights = dict(weights)
        self.take(weights)
        super().load_weights(iter(weights.items()))

    def take(self, weights):
        if "a.bias" in weights:
            raise KeyError("a.bias")


class Refused(Fussy):
    def take(self, weights):
        if "a.bias" in weights and refit_of(self) is not None:
            raise RefitError("a.bias", "wrong", "it has to be right", "Mend it.")


def test_a_name_that_sglang_does_not_take_is_laid_aside_and_said():
    row = judged("Fussy", Builder(Fussy))
    assert (row.kind, row.names, row.unreached) == ("replayed", 5, ["a.bias"])


def test_a_name_that_sglang_takes_and_the_method_refuses_makes_the_class_refused():
    row = judged("Refused", Builder(Refused))
    assert row.kind == "refused"
    assert "it has to be right" in row.reasons[0]


class Runs(Plain):
    def forward(self):
        return self.a(torch.ones(4))


class Transposes(Runs):
    """Keeps a transposed weight from its first forward pass on, which no update renews."""

    def forward(self):
        if not hasattr(self, "turned"):
            self.turned = self.a.weight.t().contiguous()
        return torch.ones(4) @ self.turned


class Breaks(Runs):
    """Can't run with this method."""

    def forward(self):
        if refit_of(self) is not None:
            raise NotImplementedError("not implemented for 'Float8_e4m3fn'")
        return super().forward()


class NeedsKernel(Runs):
    def forward(self):
        raise RuntimeError("0 active drivers ([]). There should only be one.")


class Counts(Runs):
    def forward(self):
        return torch.ones(3)


@pytest.fixture
def started(monkeypatch):
    """Judges a class that SGLang has started: a forward pass of it can be asked for."""
    monkeypatch.setattr(forward, "outputs", lambda runner: [runner.model().clone()])
    monkeypatch.setattr(
        judge, "start_model", lambda _, runner: refit_of(runner.model).note_loaded()
    )

    def judge_started(kind):
        one = Judge(kind.__name__)
        assert one.loads(Builder(kind))
        refit_of(one._loaded.model).note_loaded()
        one.started(SimpleNamespace(model=None))
        return one.row

    return judge_started


def test_a_class_is_proven_by_outputs_that_are_those_of_a_fresh_model(started):
    row = started(Runs)
    assert row.is_proven
    assert "; 1 proven by a token; 0 silent" in summary([row])


def test_a_class_whose_outputs_stay_behind_is_silent(started):
    row = started(Transposes)
    assert "outputs" in row.silent
    assert not row.is_proven


def test_a_class_that_runs_without_the_method_only_is_broken(started):
    row = started(Breaks)
    assert row.kind == "broken"
    assert "Float8" in row.reasons[0]


@pytest.mark.parametrize(
    ("kind", "reason"),
    [(NeedsKernel, "Triton kernel"), (Counts, "the same with other weights")],
)
def test_what_proves_nothing_is_said(started, kind, reason):
    row = started(kind)
    assert (row.kind, row.is_proven) == ("replayed", False)
    assert reason in row.not_run


@pytest.mark.parametrize(
    ("error", "kind"),
    [(ConfigError("--x", "set", "y", "z"), "refused"), (RuntimeError("no pool"), "not started")],
)
def test_a_start_that_fails_is_no_replayed_class(error, kind):
    one = Judge("Plain")
    assert one.loads(Builder(Plain))
    one.failed(error)
    assert one.row.kind == kind
    assert str(error)[:7] in one.row.reasons[0]


def test_a_draft_is_judged_as_sglang_serves_it():
    row = judged("PlainMTP", Builder(Plain))
    assert (row.kind, row.names, row.reasons) == ("draft", 2, [])


def test_what_a_class_relies_on_is_told_by_the_methods_own_objects(started):
    class Converts(Runs):
        def forward(self):
            if not hasattr(self.a, "kept"):
                self.a.kept = self.a.weight.double()
            return torch.ones(4, dtype=torch.float64) @ self.a.kept.t()

    assert started(Runs).relies_on == []
    assert started(Converts).relies_on == ["kept copies"]


def test_a_class_that_needs_a_package_is_a_row():
    row = judged("Impossible", Builder(Impossible))
    assert row.kind == "not built"
    assert "of_somebody_else" in row.reasons[0]


def _hangs(architecture, directory, rank):
    time.sleep(60)


def _raises(architecture, directory, rank):
    raise ImportError("No module named 'of_somebody_else'")


def _dies(architecture, directory, rank):
    os.kill(os.getpid(), signal.SIGSEGV)


@pytest.mark.parametrize(
    ("judge", "reason"),
    [
        (_hangs, "not done after 1 s"),
        (_raises, "ImportError: No module named 'of_somebody_else'"),
        (_dies, "ended by signal 11"),
    ],
)
def test_a_class_that_hangs_raises_or_dies_is_a_row(judge, reason):
    row = run_forked("Any", judge, limit=1 if judge is _hangs else 30)
    assert row.kind == "not built"
    assert reason in row.reasons[0]


def test_a_class_without_a_config_class_gets_a_config_all_the_same(tmp_path):
    assert config_class_of("NobodyForCausalLM", Plain) is None
    tiny_config("NobodyForCausalLM", Plain, tmp_path, ["num_experts"], [])
    assert '"num_experts": 4' in (tmp_path / "config.json").read_text()


def test_a_part_that_is_lacking_gets_the_keys_that_it_lacks(tmp_path):
    lacks = ["vision_config", "patch_size"]
    tiny_config("NobodyForCausalLM", Plain, tmp_path, lacks, [])
    content = json.loads((tmp_path / "config.json").read_text())
    assert content["vision_config"]["patch_size"] == 14


def test_a_part_is_the_config_of_the_model_whose_part_it_is(tmp_path):
    tiny_config("InternS1ForConditionalGeneration", Plain, tmp_path, [], [])
    part = json.loads((tmp_path / "config.json").read_text())["text_config"]
    assert (part["model_type"], part["architectures"]) == ("qwen3", ["Qwen3ForCausalLM"])
    assert part["num_hidden_layers"] == 2


def test_names_are_those_of_a_checkpoint():
    sent = Sent((1,), torch.float32)
    found = called("LlamaEmbeddingModel", {"model.norm.weight": sent})
    assert found == {"norm.weight": sent}
    assert called("LlamaForCausalLM", {"model.norm.weight": sent}) == {"model.norm.weight": sent}


@pytest.mark.parametrize(
    ("architecture", "own", "sent"),
    [
        ("DSparkMiniMaxDraftModel", "fc.weight", "dspark.fc.weight"),
        (
            "DeepseekV4ForCausalLMDSpark",
            "stages.0.mlp.experts.1.gate_proj.weight",
            "mtp.0.ffn.experts.1.w1.weight",
        ),
        (
            "InklingForConditionalGenerationMTP",
            "model.transformer_block.attn.wq_du.weight",
            "model.mtp.layers.0.transformer_block.attn.wq_du.weight",
        ),
        (
            "InternS2MobiusForConditionalGeneration",
            "model.language_model.layers.1.mlp.experts.down_proj",
            "model.language_model.meta_mlp.1.experts.down_proj",
        ),
        (
            "InternS2MobiusForConditionalGeneration",
            "model.language_model.layers.1.mlp.shared_expert_gate.weight",
            "model.language_model.layers.1.mlp.shared_expert_gate.weight",
        ),
        (
            "Phi4MMForCausalLM",
            "embed_tokens_extend.audio_projection_for_vision.0.bias",
            "model.embed_tokens_extend.audio_embed.audio_projection.vision.0.bias",
        ),
    ],
)
def test_names_are_those_that_sglang_looks_for_in_a_checkpoint(architecture, own, sent):
    one = Sent((1,), torch.float32)
    assert called(architecture, {own: one}) == {sent: one}


def test_a_tower_of_fixed_size_keeps_its_first_layers():
    tower = SimpleNamespace(blocks=nn.ModuleList(nn.Identity() for _ in range(27)))
    assert len(cut_blocks(tower).blocks) == 2
    config = SimpleNamespace(architectures=["Phi4MMForCausalLM"], vision_config=SimpleNamespace())
    assert cut_config(config).vision_config.num_hidden_layers == 2
    other = SimpleNamespace(architectures=["Phi3ForCausalLM"])
    assert vars(cut_config(other)) == {"architectures": ["Phi3ForCausalLM"]}


@pytest.mark.parametrize(
    ("architecture", "is_told"), [("Step3p5MTP", True), ("Qwen3NextForCausalLMMTP", False)]
)
def test_a_draft_is_told_its_number_where_sglang_tells_it(architecture, is_told):
    from sglang.srt.models.registry import ModelRegistry

    assert has_a_number(ModelRegistry.models[architecture]) is is_told


def test_a_model_keeps_its_radix_cache_where_sglang_asks_for_it():
    assert radix_cache("InklingForConditionalGeneration") == []
    assert radix_cache("LlamaForCausalLM") == ["--disable-radix-cache"]


def test_a_config_is_shrunk_with_all_of_its_parts():
    found = shrink(
        {
            "num_hidden_layers": 48,
            "layer_types": ["a"] * 47 + ["b"],
            "vision_config": {"hidden_size": 1152, "depth": 27},
            "eos_token_id": 151_643,
        }
    )
    assert found["layer_types"] == ["a", "b"]
    assert found["vision_config"] == {"hidden_size": 256, "depth": 2}
    assert found["num_hidden_layers"] == 2
    assert found["eos_token_id"] < 512


LISTED = {
    "num_hidden_layers": 12,
    "layer_types": ["sliding", "sliding", "sliding", "full"] * 3,
    "first_k_dense_replace": 2,
    "linear_attn_config": {"kda_layers": [0, 1, 2, 4, 5, 6, 8, 9, 10]},
    "per_layer_config": {"03": {"head_dim": 512}, "07": {"head_dim": 512}},
}


def test_a_small_model_has_every_kind_of_layer():
    small = shrink(LISTED)
    assert lost(LISTED, small) == []
    assert small["layer_types"] == ["sliding", "sliding", "full", "full"]
    assert small["first_k_dense_replace"] == 1
    assert small["linear_attn_config"] == {"kda_layers": [0, 1]}


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"layer_types": ["sliding", "sliding", "sliding"]}, "layer_types: full"),
        ({"first_k_dense_replace": 4}, "first_k_dense_replace: False"),
        ({"linear_attn_config": None}, "linear_attn_config"),
    ],
)
def test_a_kind_that_a_small_model_lost_is_told(change, told):
    assert told in lost(LISTED, shrink(LISTED) | change)


@pytest.mark.parametrize(
    "architecture",
    [
        "Qwen3NextForCausalLM",
        "Qwen3_5MoeForConditionalGeneration",
        "Gemma3nForCausalLM",
        "MiMoV2FlashForCausalLM",
        "InklingForConditionalGeneration",
        "InternS2MobiusForConditionalGeneration",
        "KimiK3ForConditionalGeneration",
        "Step3p5ForCausalLM",
        "DeepseekV3ForCausalLM",
    ],
)
def test_small_models_of_real_config_classes_lose_no_kind(architecture, tmp_path):
    from sglang.srt.models.registry import ModelRegistry

    model_class = ModelRegistry.models.get(architecture)
    if model_class is None:
        pytest.skip("this SGLang has no such class")
    assert tiny_config(architecture, model_class, tmp_path, [], []) == []


@pytest.mark.parametrize("pattern", ["Qwen3ForCasualLM", "Qwen3(ForCausalLM"])
def test_a_pattern_that_names_no_class_is_refused(pattern):
    with pytest.raises(ConfigError, match="--only"):
        matching(pattern)


def test_an_outcome_that_is_not_on_file_is_a_change(tmp_path, monkeypatch):
    monkeypatch.setattr(results, "FOLDER", tmp_path)
    monkeypatch.setattr(page, "FOLDER", tmp_path)
    rows = [
        Row("A", "replayed", names=3, is_proven=True),
        Row("B", "native", names=2, reasons=["x|y"], relies_on=["kept copies"]),
        Row("C", "replayed", names=4, not_run="needs a GPU for it", lost=["layer_types: full"]),
    ]
    path = results.write(rows)
    assert results.changed(rows) == []
    assert results.changed([Row("A", "refused"), rows[1]]) == ["A: refused, on file replayed"]
    assert results.changed([Row("D", "native")]) == ["D: native, on file nothing"]
    assert results.changed([Row("A", "not built", reasons=[f"{OUT_OF_TIME} 90 s"])]) == []
    assert results.changed(rows, is_whole=True) == []
    assert results.changed(rows[1:], is_whole=True) == ["A: not judged, on file replayed"]
    text = page.section()
    assert results.provenance()["commit"] in text
    assert "| replayed | token |  | A |" in text
    assert "| native | bytes | x\\|y | B |" in text
    assert "| replayed | bytes | its forward pass needs a GPU | C |" in text
    assert "Their small model lacks a kind of layer: C." in text
    assert "| kept copies | 1: B |" in text
    assert path.parent == tmp_path


@pytest.mark.parametrize(
    ("kind", "reason", "shown"),
    [
        ("native", "SGLang computes with it (aten.exp.default)", "SGLang computes with it"),
        ("broken", "KeyError: 'a'. The same model runs", "KeyError: 'a'"),
        ("not started", "long " * 30, f"{'long ' * 26}…"),
        ("refused", f"{'long ' * 40}. Send it whole.", f"{'long ' * 40}. Send it whole."),
        ("draft", "SGLang's own update leaves a", "SGLang's own update leaves a"),
        ("not built", "TypeError: no such size", "TypeError: no such size"),
        (
            "not built",
            "NameError: name 'ms' is not defined",
            "SGLang needs the package `mindspore`",
        ),
        (
            "not built",
            "RuntimeError: Dots3 model only supports CUDA backend.",
            "SGLang needs a GPU, and says so",
        ),
    ],
)
def test_the_page_shortens_every_reason_but_that_of_a_refusal(
    kind, reason, shown, tmp_path, monkeypatch
):
    monkeypatch.setattr(results, "FOLDER", tmp_path)
    monkeypatch.setattr(page, "FOLDER", tmp_path)
    results.write([Row("A", kind, reasons=[reason])])
    proof = "bytes" if kind in ("native", "not started") else ""
    assert f"| {kind} | {proof} | {shown} | A |" in page.section()


def test_a_family_is_shown_as_what_its_classes_were_found(tmp_path, monkeypatch):
    monkeypatch.setattr(results, "FOLDER", tmp_path)
    monkeypatch.setattr(families, "FAMILIES", {"F": ("A", "B", "C", "D", "E")})
    parted = Row("A", "replayed", names=3, is_parted=True, other_names=True, is_proven=True)
    whole = Row("B", "native", names=2, reasons=["it computes"], whole_only="x: not alone")
    results.write([parted, whole, Row("C", "refused", reasons=["no"]), Row("D", "draft", names=2)])
    text = families.section()
    none = "not tried | not tried"
    assert f"| F | A | yes | yes | yes | yes | yes | {none} |  |" in text
    assert f"| F | B | yes | no | no |  | no | {none} | it computes; x: not alone |" in text
    assert "| F | C | refused |" in text
    assert "| F | D | in high precision | no |" in text
    assert "| F | E | not tried |" in text
