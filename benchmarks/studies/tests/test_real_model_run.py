"""The real-model benchmark's bad input, and what an interrupted run keeps; no server, no network."""

from __future__ import annotations

from pathlib import Path

import pytest
from rich.progress import Progress
from studies.real_model import texts
from studies.real_model.arms import ARMS, BASELINE, chosen
from studies.real_model.collect import Collector, Inputs, Sizes
from studies.real_model.kept import Kept, digest
from studies.real_model.models import CACHE_VARIABLE
from studies.real_model.serving import last_logprobs
from studies.real_model.trainer_side import check_memory

from sglang_fp8rl.config import Options
from sglang_fp8rl.errors import ConfigError, EvaluationError, HostError


class WordTokenizer:
    """One token for each word with a letter in it; none for anything else."""

    chat_template = None

    def __call__(self, text, add_special_tokens=True):
        return {"input_ids": [len(word) for word in text.split() if any(c.isalpha() for c in word)]}


@pytest.fixture
def kept(tmp_path, monkeypatch):
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path))
    return Kept({"seed": 1})


def test_prompts_are_repeated_up_to_the_count(tmp_path):
    (tmp_path / "prompts.txt").write_text("a bb ccc\n\ndddd\n")
    found = texts.prompts(tmp_path / "prompts.txt", WordTokenizer(), 3)
    assert found == [[1, 2, 3], [4], [1, 2, 3]]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("words\n123 456\n", r"prompts\.txt:2: '123 456'; the tokenizer makes no token"),
        ("\n \n", "holds no prompt"),
        (None, "UTF-8 text file"),
    ],
)
def test_prompts_that_are_none_are_refused_by_line(tmp_path, content, message):
    if content is not None:
        (tmp_path / "prompts.txt").write_text(content)
    with pytest.raises(EvaluationError, match=message):
        texts.prompts(tmp_path / "prompts.txt", WordTokenizer(), 3)


def test_the_packaged_texts_are_there_and_too_many_windows_are_refused():
    found = texts.windows(WordTokenizer(), 2, 16)
    assert [len(window) for window in found] == [16] * (2 * len(texts.TEXTS))
    with pytest.raises(ConfigError, match="windows of 100000"):
        texts.windows(WordTokenizer(), 2, 100_000)


def test_a_model_that_does_not_fit_is_refused_with_numbers(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(bytes(1 << 20))
    check_memory(tmp_path, 3.0, available=4 << 30)
    with pytest.raises(ConfigError, match=r"3\.0 GiB needed, 2\.0 free"):
        check_memory(tmp_path, 3.0, available=2 << 30)


def test_arms_are_options_that_the_method_knows_and_the_baseline_comes_first():
    for arm in ARMS.values():
        Options.from_dict(arm.options)
    assert [arm.name for arm in chosen("fp8_direct, fp8_blockwise")] == [
        BASELINE,
        "fp8_blockwise",
        "fp8_direct",
    ]
    with pytest.raises(ConfigError, match="fp8_indirect"):
        chosen("bf16,fp8_indirect")


def test_a_chosen_set_is_one_arm_more_and_leaves_exactly_these_modules():
    names = ("model.layers.0.mlp.down_proj", "model.layers.1.self_attn.qkv_proj")
    *others, last = chosen("fp8_blockwise", names)
    assert others == chosen("fp8_blockwise")
    assert Options.from_dict(last.options).ignored_layers == names


def test_what_was_measured_is_not_measured_again(kept):
    """No server could start here: there is no model."""
    arm = ARMS["fp8_direct"]
    measured = {"answers": [[-1.0]], "text": [[-2.0]], "own": None}
    kept.write(f"arm-{arm.name}-{digest([arm.options, arm.args, arm.env])}", measured)
    kept.write("answers", [{"prompt_ids": [1], "output_ids": [2], "logprobs": [-1.0]}])
    for part in ("answers", "text"):
        kept.write(f"trainer-bfloat16-{part}", [[-3.0]])
    inputs = Inputs([[1]], [0], [[1, 2]])
    collector = Collector(Path("nowhere"), inputs, Sizes(), kept, 1, Progress())
    assert collector.arm(arm) == measured
    assert collector.trainer("bfloat16", {}) == {"answers": [[-3.0]], "text": [[-3.0]]}


def test_half_a_piece_is_none_and_other_conditions_are_another_run(kept):
    (kept.folder / "answers.partial").write_text("[[1, 2")
    assert kept.read("answers") is None
    kept.write("answers", [[1]])
    assert Kept({"seed": 1}).read("answers") == [[1]]
    assert Kept({"seed": 2}).read("answers") is None
    assert Kept({"seed": 1}, fresh=True).read("answers") is None


def test_a_server_that_scores_other_tokens_is_noticed():
    pairs = [(None, 5, None), (-1.0, 6, None), (-2.0, 7, None)]
    assert last_logprobs(pairs, [6, 7]).tolist() == [-1.0, -2.0]
    for tokens in ([6, 8], [5, 6, 7], [4, 5, 6, 7]):
        with pytest.raises(HostError, match="they end with"):
            last_logprobs(pairs, tokens)
