"""`mismatch`: the pieces, and the whole with a fake engine that a real small model stands behind."""

from __future__ import annotations

import json
import math
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.eval.eval_server import FakeServer
from typer.testing import CliRunner

from sglang_fp8rl.errors import ConfigError, EvaluationError
from sglang_fp8rl.lab.cli import app
from sglang_fp8rl.lab.eval import gap
from sglang_fp8rl.lab.eval.gap import compare_rollouts, load_model, rescore, run_mismatch
from sglang_fp8rl.lab.eval.mismatch import check_plot_path
from sglang_fp8rl.lab.eval.prompts import load_prompts
from sglang_fp8rl.lab.eval.server import Rollout, identify, sample_rollouts

VOCABULARY = 64


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        vocab_size=VOCABULARY,
        initializer_range=0.5,
    )
    path = tmp_path_factory.mktemp("model")
    Qwen3ForCausalLM(config).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def model(checkpoint):
    return load_model(str(checkpoint), "float32", "cpu")


@torch.inference_mode()
def decode(model, prompt, count, temperature, generator):
    """Token by token, without a cache: the slow oracle of `rescore`."""
    ids, logprobs = list(prompt), []
    for _ in range(count):
        scores = (model(torch.tensor([ids])).logits[0, -1] / temperature).log_softmax(-1)
        token = int(torch.multinomial(scores.exp(), 1, generator=generator))
        ids.append(token)
        logprobs.append(scores[token].item())
    return Rollout(list(prompt), ids[len(prompt) :], logprobs)


@pytest.mark.parametrize("temperature", [1.0, 0.5, 2.0])
def test_rescoring_equals_step_by_step_decoding(model, temperature):
    generator = torch.Generator().manual_seed(1)
    prompts = [[5], [1, 2, 3, 4, 5, 6, 7], [63, 0]]
    rollouts = [
        decode(model, p, n, temperature, generator) for p, n in zip(prompts, (1, 9, 4), strict=True)
    ]
    scored = rescore(model, rollouts, temperature)
    for rollout, logprobs in zip(rollouts, scored, strict=True):
        assert logprobs.tolist() == pytest.approx(rollout.logprobs, abs=1e-4)
    metrics = compare_rollouts(rollouts, scored, {}).metrics
    assert (metrics.tokens, metrics.sequences) == (14, 3)
    assert metrics.kl_k3 < 1e-8


def test_rollouts_of_unequal_length_keep_their_tokens_together():
    rollouts = [Rollout([1], [2, 3], [-1.0, -2.0]), Rollout([1], [], []), Rollout([1], [4], [-3.0])]
    scored = [torch.tensor([-1.5, -2.0]), torch.zeros(0), torch.tensor([-2.5])]
    report = compare_rollouts(rollouts, scored, {})
    assert report.rollout_logprobs.tolist() == [-1.0, -2.0, -3.0]
    assert report.trainer_logprobs.tolist() == [-1.5, -2.0, -2.5]
    assert report.metrics.sequences == 2


def test_a_token_of_another_vocabulary_is_named(model):
    with pytest.raises(
        EvaluationError, match="completion 0: token id 64; the model's vocabulary has 64"
    ):
        rescore(model, [Rollout([1], [64], [-1.0])])


def engine(model):
    """A /generate that samples from `model` itself, one prompt per entry of the batch."""
    generator = torch.Generator().manual_seed(2)

    def answer(body):
        params = body["sampling_params"]
        assert body["return_logprob"]
        assert (params["top_p"], params["top_k"], params["min_p"]) == (1.0, -1, 0.0)
        replies = []
        for ids in body["input_ids"]:
            made = decode(model, ids, params["max_new_tokens"], params["temperature"], generator)
            pairs = zip(made.logprobs, made.output_ids, strict=True)
            meta = {
                "finish_reason": {"type": "length"},
                "output_token_logprobs": [[logprob, token, None] for logprob, token in pairs],
            }
            replies.append({"output_ids": made.output_ids, "meta_info": meta})
        return replies

    return answer


@pytest.fixture
def server(model, monkeypatch):
    with FakeServer(str) as found:
        answer = engine(model)
        monkeypatch.setattr(found, "generate", lambda *_: answer(found.bodies[-1]))
        yield found


def test_a_twin_has_no_gap_and_another_model_has_one(server, model, checkpoint, monkeypatch):
    twin = run_mismatch(server.url, str(checkpoint), max_new_tokens=8, dtype="float32")
    assert twin.metrics.tokens == 16 * 8  # random prompts: the checkpoint has no tokenizer
    assert twin.metrics.kl_k3 < 1e-8
    rounded = run_mismatch(server.url, str(checkpoint), max_new_tokens=8, dtype="bfloat16")
    assert rounded.metrics.kl_k3 > 10 * twin.metrics.kl_k3


def test_command_draws_and_reports(server, checkpoint, tmp_path):
    plot = tmp_path / "gap.png"
    args = ["--url", server.url, "--model", checkpoint, "--max-new-tokens", 4, "--plot", plot]
    result = invoke(*args, "--json")
    assert result.exit_code == 0, result.stderr
    assert json.loads(result.stdout)["metrics"]["tokens"] == 64
    assert plot.read_bytes().startswith(b"\x89PNG")
    table = invoke(*args[:6])
    assert "KL(rollout || trainer), k3" in table.stdout


def test_command_ends_with_status_two(checkpoint, tmp_path):
    with FakeServer(str) as server:
        nowhere = invoke("--url", server.url, "--model", tmp_path)
    assert nowhere.exit_code == 2
    assert "--model" in nowhere.stderr
    plot = tmp_path / "no" / "a.png"
    unwritable = invoke("--url", server.url, "--model", checkpoint, "--plot", plot)
    assert unwritable.exit_code == 2
    assert "in a folder that exists" in unwritable.stderr


def test_every_request_has_the_keys_that_the_environment_names(server, checkpoint, monkeypatch):
    made = []

    class Client:
        def __init__(self, url, **keys):
            made.append(keys)

        def plan(self):
            return None

    monkeypatch.setattr(gap, "RefitClient", Client)
    for name in ("compute_as_served", "check_as_served"):
        monkeypatch.setattr(gap, name, lambda *_: None)
    monkeypatch.setenv("SGLANG_API_KEY", "one")
    monkeypatch.setenv("SGLANG_ADMIN_API_KEY", "two")
    args = ("--url", server.url, "--model", checkpoint, "--max-new-tokens", 1, "--as-served")
    assert invoke(*args).exit_code == 0
    assert server.keys == {"Bearer one"}
    assert made == [{"api_key": "one", "admin_api_key": "two"}]


def invoke(*args):
    return CliRunner().invoke(app, ["mismatch", *map(str, args)])


GOOD_META = {"finish_reason": {"type": "stop"}, "output_token_logprobs": [[-1.0, 3, None]]}


@pytest.mark.parametrize(
    ("reply", "message"),
    [
        ((400, {"error": "too long"}), "HTTP 400: .*too long"),
        ((200, b"<html>"), "output_token_logprobs"),
        ((200, [{"meta_info": GOOD_META}] * 2), "2 completions of 1 prompts"),
        ((200, [{"text": "x"}]), "output_token_logprobs"),
        ((200, [{"meta_info": GOOD_META | {"output_token_logprobs": [[None, 3]]}}]), "each reply"),
        ((200, [{"meta_info": GOOD_META | {"finish_reason": {"type": "abort"}}}]), "aborted"),
    ],
)
def test_a_reply_without_log_probabilities_is_an_error(reply, message):
    with FakeServer(str) as server:
        server.faults = [reply]
        with pytest.raises(EvaluationError, match=message):
            sample_rollouts(server.url, [[1, 2]], max_new_tokens=1)


def test_prompts_are_sent_in_batches_and_stay_in_order():
    def reply(count, first):
        meta = [GOOD_META | {"output_token_logprobs": [[-1.0, first + i]]} for i in range(count)]
        return 200, [{"meta_info": entry} for entry in meta]

    with FakeServer(str) as server:
        server.faults = [reply(32, 0), reply(8, 32)]
        found = sample_rollouts(server.url, [[i] for i in range(40)], max_new_tokens=1)
    assert [rollout.prompt_ids[0] for rollout in found] == list(range(40))
    assert [rollout.output_ids[0] for rollout in found] == list(range(40))


def tokenizer(text):
    return {"input_ids": [ord(letter) for letter in text]}


def test_prompts_come_from_text_json_lines_built_ins_or_chance(tmp_path):
    text, rows = tmp_path / "p.txt", tmp_path / "p.jsonl"
    text.write_text("ab\n\nc\n")
    rows.write_text('{"prompt": "ab"}\n{"input_ids": [7, 8]}\n"c"\n')
    assert load_prompts(text, tokenizer, 999) == [[97, 98], [99]]
    assert load_prompts(rows, tokenizer, 999) == [[97, 98], [7, 8], [99]]
    assert len(load_prompts(None, tokenizer, 999)) == 8
    marked = "\ufeff" + json.dumps({"prompt": "\u2028\x85"}, ensure_ascii=False)  # not lines' ends
    rows.write_text(marked + "\n", encoding="utf-8")
    assert load_prompts(rows, tokenizer, 9999) == [[0x2028, 0x85]]
    text.write_text("a\fb\u2028c\n", encoding="utf-8")
    assert load_prompts(text, tokenizer, 9999) == [[97, 12, 98, 0x2028, 99]]
    chance = load_prompts(None, None, 50)
    assert chance == load_prompts(None, None, 50)
    assert 0 <= min(map(min, chance)) <= max(map(max, chance)) < 50


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("p.jsonl", '{"prompt": "a"}\n{"prompt"', r"p.jsonl:2: .*Repair or delete"),
        ("p.jsonl", '{"input_ids": [1, -2]}', r"p.jsonl:1: .*a prompt is a text"),
        ("p.jsonl", '{"input_ids": []}', r"p.jsonl:1"),
        ("p.jsonl", "[1, 2]", r"p.jsonl:1: \[1, 2\]"),
        ("p.jsonl", '{"input_ids": [1, 999]}', r"p.jsonl:1: token id 999; .*has 999 entries"),
        ("p.txt", "ab\nz\u4e2d", r"p.txt:2: token id 20013; .*has 999 entries"),
        ("p.txt", "\n \n", "it holds no prompt"),
    ],
)
def test_bad_prompts_are_named(tmp_path, name, content, message):
    path = tmp_path / name
    path.write_text(content, encoding="utf-8")
    with pytest.raises(EvaluationError, match=message):
        load_prompts(path, tokenizer, 999)


def test_text_without_a_tokenizer_is_refused(tmp_path):
    (tmp_path / "p.txt").write_text("hello")
    with pytest.raises(EvaluationError, match=r"p.txt:1: a text; there is no tokenizer"):
        load_prompts(tmp_path / "p.txt", None, 50)
    with pytest.raises(EvaluationError, match="Check the path"):
        load_prompts(tmp_path / "none.txt", tokenizer, 50)
    (tmp_path / "b.txt").write_bytes(b"\xff\xfe\n")
    with pytest.raises(EvaluationError, match="UTF-8"):
        load_prompts(tmp_path / "b.txt", tokenizer, 50)


@pytest.mark.parametrize(
    "options", [{"max_new_tokens": 0}, {"temperature": 0.0}, {"dtype": "float8"}]
)
def test_bad_options_are_refused_before_anything_is_loaded(options):
    with pytest.raises(ConfigError):
        run_mismatch("http://h:1", "no-such-model", **options)


def test_an_unknown_device_is_named(checkpoint):
    with pytest.raises(ConfigError, match="--device: 'gpu'"):
        load_model(str(checkpoint), "float32", "gpu")


def test_a_plot_in_an_unknown_format_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"--plot: .*gap.jpeg2"):
        check_plot_path(tmp_path / "gap.jpeg2")


def test_undefined_values_are_null_in_json(monkeypatch):
    rollouts, scored = [Rollout([1], [2], [-1.0])], [torch.tensor([-1000.0])]
    report = compare_rollouts(rollouts, scored, {"url": "u"})
    assert math.isnan(report.metrics.prob_pearson)
    assert math.isinf(report.metrics.trainer_ppl)
    monkeypatch.setattr(gap, "run_mismatch", lambda *_, **__: report)
    told = invoke("--url", "u", "--model", "m", "--json").stdout
    found = json.loads(told, parse_constant=lambda word: pytest.fail(word))
    assert found["settings"] == {"url": "u"}
    assert (found["metrics"]["prob_pearson"], found["metrics"]["trainer_ppl"]) == (None, None)


def test_a_checkpoint_without_all_weights_is_refused_and_not_filled_with_chance(
    checkpoint, tmp_path
):
    shutil.copytree(checkpoint, tmp_path / "part")
    weights = load_file(checkpoint / "model.safetensors")
    del weights["lm_head.weight"]
    save_file(weights, tmp_path / "part" / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(EvaluationError, match=r"no weights for \['lm_head.weight'\]"):
        load_model(str(tmp_path / "part"), "float32", "cpu")


@pytest.mark.parametrize(
    "changed",
    [
        {"intermediate_size": 128},
        {"num_attention_heads": "two"},
        {"quantization_config": {"quant_method": "awq", "bits": 4}},
    ],
)
def test_whatever_transformers_raises_is_told_of_the_model(checkpoint, tmp_path, changed):
    shutil.copytree(checkpoint, tmp_path / "odd")
    config = json.loads((checkpoint / "config.json").read_text())
    (tmp_path / "odd" / "config.json").write_text(json.dumps(config | changed))
    with pytest.raises(EvaluationError, match=r"--model: .*odd"):
        load_model(str(tmp_path / "odd"), "float32", "cpu")


def test_a_model_that_ties_its_weights_is_whole(model, tmp_path):
    tied = type(model)(type(model.config)(**model.config.to_dict() | {"tie_word_embeddings": True}))
    tied.save_pretrained(tmp_path)
    assert "lm_head.weight" not in load_file(tmp_path / "model.safetensors")
    load_model(str(tmp_path), "float32", "cpu")


def test_a_key_that_no_header_holds_is_told():
    with pytest.raises(EvaluationError, match="latin-1"):
        identify("http://127.0.0.1:9", "key €")
