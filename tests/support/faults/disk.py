"""Updates from checkpoints on disk that are not whole."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import torch

from sglang_fp8rl.compat import OLDEST, host_version
from sglang_fp8rl.lab.testing.checkpoints import save_checkpoint
from sglang_fp8rl.wire.bucket import NamedTensor
from support.engine.models import MODELS

from .fault import Group, Then
from .trainer import DOWN, HEAD, MISSPELT, NORM, Answer, Tensors, Trainer

GROUP = Group("Updates from disk")
row = GROUP.row
CONFIG = MODELS["qwen3"].config


def written(
    trainer: Trainer, change: Callable[[Tensors], object] = lambda tensors: None, shards: int = 1
) -> Path:
    """The next weights as a checkpoint, changed first."""
    tensors = dict(trainer.new)
    change(tensors)
    path = trainer.directory / "checkpoint"
    return save_checkpoint(path, CONFIG, tensors, shards=shards)


@row(host=True)
def a_directory_that_is_not_there(trainer: Trainer) -> Answer:
    return trainer.disk(trainer.directory / "nothing")


@row("Cannot find any model weights", host=True)
def a_directory_without_weights(trainer: Trainer) -> Answer:
    path = written(trainer)
    (path / "model.safetensors").unlink()
    return trainer.disk(path)


@row("deserializing header", host=True)
def a_file_that_is_cut(trainer: Trainer) -> Answer:
    path = written(trainer)
    file = path / "model.safetensors"
    content = file.read_bytes()
    file.write_bytes(content[: len(content) // 2])
    return trainer.disk(path)


@row("deserializing header", host=True)
def a_file_that_is_not_a_checkpoint(trainer: Trainer) -> Answer:
    path = written(trainer)
    (path / "model.safetensors").write_bytes(b"not a checkpoint" * 100)
    return trainer.disk(path)


# 0.5.16 loads the files that are there, and the status says what is old.
@row(host=True, then_here=Then.MIXED if host_version() == OLDEST else None)
def a_shard_that_is_missing(trainer: Trainer) -> Answer:
    path = written(trainer, shards=2)
    (path / "model-00002-of-00002.safetensors").unlink()
    return trainer.disk(path)


@row("deserializing header", host=True, serves=None)
def a_shard_that_is_cut(trainer: Trainer) -> Answer:
    path = written(trainer, shards=2)
    file = path / "model-00002-of-00002.safetensors"
    file.write_bytes(file.read_bytes()[:-4096])
    return trainer.disk(path)


@row("left out", about=HEAD, then=Then.MIXED, serves=None)
def a_tensor_that_the_index_has_and_no_shard(trainer: Trainer) -> Answer:
    path = written(trainer, lambda tensors: tensors.pop(HEAD), shards=2)
    index = path / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    content["weight_map"][HEAD] = "model-00002-of-00002.safetensors"
    index.write_text(json.dumps(content))
    return trainer.disk(path)


@row("no parameter takes", about=MISSPELT, serves=None)
def a_misspelt_name_on_disk(trainer: Trainer) -> Answer:
    def change(tensors: Tensors) -> None:
        tensors[MISSPELT] = tensors.pop(DOWN)

    return trainer.disk(written(trainer, change))


@row("left out", about="model.layers.1.", then=Then.MIXED, serves=None)
def a_layer_that_is_missing_on_disk(trainer: Trainer) -> Answer:
    def change(tensors: Tensors) -> None:
        for name in [name for name in tensors if "layers.1." in name]:
            del tensors[name]

    return trainer.disk(written(trainer, change))


@row("left out", about=NORM, then=Then.MIXED, serves=None)
def a_norm_that_is_missing_on_disk(trainer: Trainer) -> Answer:
    return trainer.disk(written(trainer, lambda tensors: tensors.pop(NORM)))


def instead(word: str, told: str, wrong: Callable[[Trainer], NamedTensor]) -> None:
    """A row for a checkpoint with one tensor that is wrong."""
    row(told, about=DOWN, serves=None, word=word)(
        lambda trainer: trainer.disk(
            written(trainer, lambda tensors: tensors.update([wrong(trainer)]))
        )
    )


instead("a_wrong_shape_on_disk", "shape", lambda trainer: (DOWN, torch.ones(256, 256)))
instead("a_nan_on_disk", "NaN or Inf", lambda trainer: trainer.broken(DOWN, (0, 0), float("nan")))
