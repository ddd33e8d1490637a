"""The one who makes mistakes: sends whatever it is told to, and takes whatever comes back."""

from __future__ import annotations

import base64
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from sglang_fp8rl.client import RefitClient
from sglang_fp8rl.lab.testing.layouts import to_text
from sglang_fp8rl.wire.bucket import Bucket, NamedTensor
from sglang_fp8rl.wire.handles import serialize
from support.by_definition import quantize_blockwise

Tensors = dict[str, torch.Tensor]
Change = Callable[[list[SimpleNamespace]], Any]

DOWN = "model.layers.0.mlp.down_proj.weight"  # [256, 512]: served alone in its parameter
MISSPELT = DOWN.replace("down", "donw")
UP = "model.layers.1.mlp.up_proj.weight"  # [512, 256]: half of a fused one
QUERY = "model.layers.0.self_attn.q_proj.weight"  # [256, 256]
NORM = "model.norm.weight"  # [256], high precision
HEAD = "lm_head.weight"  # [512, 256], high precision
EMBEDDING = "model.embed_tokens.weight"


@dataclass(frozen=True)
class Answer:
    """What a client is told.

    Attributes:
        code: HTTP status, or what it would have been.
        text: the message.
    """

    code: int
    text: str


@dataclass
class Trainer(ABC):
    """Sends to one server or engine.

    Attributes:
        old: the weights that are served, and `new`: the next ones. They differ in every block.
        directory: for checkpoints and traces.
        memory: of tensors that were sent; the server maps it by name.
    """

    old: Tensors
    new: Tensors
    directory: Path
    memory: list[Any] = field(default_factory=list)

    # -- what a server and an engine do in ways of their own ---------------------------------------

    @property
    def ranks(self) -> int:
        """Each reads a payload of its own."""
        return 1

    @abstractmethod
    def payload(
        self, payloads: list[str], load_format: str | None = None, flush: bool = True
    ) -> Answer:
        """`update_weights_from_tensor` with serialized payloads, one for each rank."""

    @abstractmethod
    def begin(self) -> Answer: ...

    @abstractmethod
    def end(self) -> Answer: ...

    @abstractmethod
    def disk(self, path: Path) -> Answer:
        """`update_weights_from_disk`."""

    # -- well-formed ways to send ------------------------------------------------------------------

    def pickled(self, value: Any, load_format: str | None = None, flush: bool = True) -> Answer:
        """Any value, as SGLang's serializer would send it."""
        self.memory.append(value)
        payloads = [serialize(value) for _ in range(self.ranks)]  # a handle is for one reader
        return self.payload(payloads, load_format, flush)

    def send(self, *named_tensors: NamedTensor, flush: bool = True) -> Answer:
        """Tensors in one call."""
        return self.pickled(list(named_tensors), None, flush)

    def flat(
        self,
        named_tensors: Sequence[NamedTensor],
        change: Change = lambda metadata: None,
        as_text: bool = True,
    ) -> Answer:
        """A flattened bucket, its layout changed first. What `change` returns, if anything, is sent as
        the layout."""
        filled = Bucket.of(list(named_tensors))
        flat, metadata = filled.flat, filled.metadata
        layout = change(metadata)
        if layout is None:
            layout = to_text(metadata) if as_text else metadata
        return self.pickled({"flattened_tensor": flat, "metadata": layout}, "flattened_bucket")

    # -- what there is to send ---------------------------------------------------------------------

    def fresh(self, name: str) -> NamedTensor:
        """A tensor of the next weights."""
        return name, self.new[name]

    def broken(self, name: str, at: Any, value: float, dtype: Any = None) -> NamedTensor:
        """One with a wrong number in it."""
        tensor = self.new[name].clone().to(dtype or self.new[name].dtype)
        tensor[at] = value
        return name, tensor

    def pair(self, name: str) -> tuple[NamedTensor, NamedTensor]:
        """Codes and scales of a tensor of the next weights."""
        codes, scale = quantize_blockwise(self.new[name])
        return (name, codes), (f"{name}_scale_inv", scale)


def encoded(content: bytes) -> str:
    return base64.b64encode(content).decode("ascii")


def said_by(update: Callable[[], object], error: type[Exception]) -> Answer:
    """What a client's own update raises."""
    try:
        update()
    except error as raised:
        return Answer(0, str(raised))
    return Answer(200, "")


class ServerTrainer(Trainer):
    """Over HTTP."""

    def __init__(self, url: str, old: Tensors, new: Tensors, directory: Path) -> None:
        super().__init__(old, new, directory)
        self.url = url

    def http(self, method: str, path: str, **options: Any) -> Answer:
        import requests

        answer = requests.request(method, self.url + path, timeout=120, **options)
        text = answer.text
        if "json" in answer.headers.get("content-type", "") and answer.text:
            content = answer.json()
            text = content.get("message", text) if isinstance(content, dict) else text
        return Answer(answer.status_code, str(text))

    def post(self, path: str, body: Any = None) -> Answer:
        return self.http("POST", path, json={} if body is None else body)

    def client(self) -> RefitClient:
        return RefitClient(self.url)

    def payload(
        self, payloads: list[str], load_format: str | None = None, flush: bool = True
    ) -> Answer:
        body = {"serialized_named_tensors": payloads, "load_format": load_format}
        return self.post("/update_weights_from_tensor", {**body, "flush_cache": flush})

    def noted(self, note: Any, *named_tensors: NamedTensor, flush: bool = True) -> Answer:
        """Tensors in one call that says which refit it belongs to (docs/reliability.md)."""
        self.memory.append(named_tensors)
        body = {"serialized_named_tensors": [serialize(list(named_tensors))], "flush_cache": flush}
        rid = note if isinstance(note, str) else json.dumps({"fp8rl_refit": note})
        return self.post("/update_weights_from_tensor", {**body, "rid": rid})

    def begin(self) -> Answer:
        return self.post("/begin_weight_update")

    def end(self) -> Answer:
        return self.post("/end_weight_update")

    def disk(self, path: Path) -> Answer:
        return self.post("/update_weights_from_disk", {"model_path": str(path)})
