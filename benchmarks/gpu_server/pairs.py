"""Pairs of servers: one started on the weights that the other is refitted to. Which configurations, and their steps."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import requests
import torch

from sglang_fp8rl import RefitClient
from sglang_fp8rl.config import QUANTIZATION_METHOD
from sglang_fp8rl.errors import RefitError
from sglang_fp8rl.lab.testing.checkpoints import (
    make_config,
    make_state_dict,
    perturbed,
    save_checkpoint,
)
from sglang_fp8rl.lab.testing.outputs import Output, ask, differences, make_prompts
from sglang_fp8rl.lab.testing.server import ServerProcess

from .graphs import captures_in
from .servers import ENVIRONMENT

Weights = dict[str, torch.Tensor]
Step = Callable[[], dict[str, Any] | None]

_SMALL_BUCKET = 4 << 20
_COMMON = ("--max-total-tokens=4096", "--max-running-requests=8", "--mem-fraction-static=0.5")
_NO_PREFILL_GRAPH = "--disable-prefill-cuda-graph"
_COLOCATED_REFITS = 3


@dataclass(frozen=True)
class Configuration:
    """What two servers have in common.

    Attributes:
        sizes: of the model's config.
        options: `quantization_config` of this package.
        is_colocated: memory is released before each of some more refits, as a trainer on the same GPU does.
    """

    name: str
    family: str = "qwen3"
    sizes: dict[str, Any] = field(default_factory=dict)
    args: tuple[str, ...] = (_NO_PREFILL_GRAPH,)
    options: dict[str, Any] = field(default_factory=dict)
    is_colocated: bool = False


# Layers of Qwen3-8B.
_ALIGNED: dict[str, Any] = {
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
}
_EXPERTS: dict[str, Any] = {
    "hidden_size": 512,
    "num_experts": 16,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 3,
}
CONFIGURATIONS = (
    Configuration("aligned", sizes=_ALIGNED),
    Configuration("misaligned", sizes={"hidden_size": 576, "intermediate_size": 1368}),
    Configuration(
        "misaligned, prefill graph",
        sizes={"hidden_size": 576, "intermediate_size": 1368},
        args=(),
    ),
    Configuration("experts", "qwen3_moe", _EXPERTS),
    Configuration(
        "experts, colocated",
        "qwen3_moe",
        _EXPERTS,
        (_NO_PREFILL_GRAPH, "--enable-memory-saver"),
        is_colocated=True,
    ),
    Configuration("FP8 KV cache", args=(_NO_PREFILL_GRAPH, "--kv-cache-dtype=fp8_e4m3")),
    Configuration("BF16 activations", sizes=_ALIGNED, options={"activations": "bf16"}),
    Configuration(
        "experts, BF16 activations", "qwen3_moe", _EXPERTS, options={"activations": "bf16"}
    ),
    Configuration(
        "Triton's GEMM, BF16 activations",
        args=(_NO_PREFILL_GRAPH, "--fp8-gemm-backend=triton"),
        options={"activations": "bf16"},
    ),
    Configuration(
        "per channel, BF16 activations",
        options={"activations": "bf16", "granularity": "per_channel"},
    ),
    Configuration(
        "MLA, colocated",
        "deepseek_v3",
        # SGLang's Triton attention compiles for real sizes only; routing takes FlashInfer's sources.
        {"kv_lora_rank": 512, "first_k_dense_replace": 2},
        args=(_NO_PREFILL_GRAPH, "--enable-memory-saver"),
        is_colocated=True,
    ),
)


class Pair:
    """Two servers of a configuration: `refitted` has the first weights, `fresh` the second ones.

    Args:
        device: of the tensors that are sent.
    """

    def __init__(
        self, configuration: Configuration, directory: Path, device: torch.device, timeout: float
    ) -> None:
        self.configuration, self._device = configuration, device
        on_gpu = device.type == "cuda"
        config = make_config(configuration.family, **configuration.sizes)
        self._prompts = make_prompts(config.vocab_size)
        first = make_state_dict(config, seed=0)
        self._weights = {"first": first, "second": perturbed(first, seed=1)}
        args = [f"--quantization={QUANTIZATION_METHOD}", *_COMMON]
        args += configuration.args if on_gpu else ()
        if configuration.options:
            override = {"quantization_config": configuration.options}
            args += ["--json-model-override-args", json.dumps(override)]
        name = re.sub(r"\W+", "-", configuration.name)
        self.servers: list[ServerProcess] = []
        for which, weights in self._weights.items():
            path = save_checkpoint(directory / f"{name}-{which}", config, weights)
            self.servers.append(
                ServerProcess(
                    path,
                    args,
                    log_path=directory / f"{name}-{which}.log",
                    env=ENVIRONMENT if on_gpu else {},
                    timeout=timeout,
                    on_gpu=on_gpu,
                )
            )
        self._timeout = timeout
        self._expected: dict[str, list[Output]] = {}

    def steps(self) -> Iterator[tuple[str, Step]]:
        """Each with its name, in order; a step raises `RefitError` where something does not hold."""
        self._client, fresh = (
            RefitClient(server.url, timeout=self._timeout) for server in self.servers
        )
        self._fresh = fresh
        yield "generate", self._generate
        # A state of the second weights and back: recorded, then replayed.
        yield "FP32", lambda: self._update("second", bucket_bytes=_SMALL_BUCKET)
        yield "FP32, back", lambda: self._update("first", bucket_bytes=_SMALL_BUCKET)
        yield "FP32, replayed", lambda: self._update("second", bucket_bytes=_SMALL_BUCKET)
        yield "FP32, one bucket", lambda: self._update("first")
        yield "from the CPU", lambda: self._update("second", device=torch.device("cpu"))
        yield "BF16", lambda: self._update("first", dtype=torch.bfloat16)
        yield "FP32, verified", lambda: self._update("second", verify=True)
        yield "fingerprints", self._fingerprints
        yield "SGLang's own client", self._hosts_client
        yield "NaN", self._nan
        yield "behind the NaN", lambda: self._update("second")
        for number in range(_COLOCATED_REFITS if self.configuration.is_colocated else 0):
            yield f"colocated refit {number + 1}", self._colocated
        yield "log", self._log

    # -- steps -----------------------------------------------------------------------------------------

    def _generate(self) -> None:
        """Both servers repeat themselves, and differ."""
        found = {}
        for which, client in (("first", self._client), ("second", self._fresh)):
            self._expected[which] = ask(client, self._prompts)
            found[which] = differences(ask(client, self._prompts), self._expected[which])
            self._hold(not found[which], found[which], "the same request has the same answer")
        differing = differences(self._expected["first"], self._expected["second"])
        self._hold(bool(differing), "the same answers", "other weights answer otherwise")

    def _update(
        self,
        which: str,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | None = None,
        **options: Any,
    ) -> dict[str, Any]:
        """Send these weights and compare with the server that was started on them."""
        sent = self._sent(which, dtype, device or self._device)
        counts = self._client.status()["replay"]
        result = self._client.update(sent, **options)
        status = self._client.status()
        replay = {key: status["replay"][key] - counts[key] for key in ("calls", "native_calls")}
        self._compare(which, status)
        return {
            "seconds": round(result.seconds, 4),
            "server_seconds": round(result.server_seconds, 4),
            "load_seconds": status["last_refit"]["seconds"],
            "buckets": result.buckets,
            "replayed": replay["calls"],
            "native": replay["native_calls"],
            "native_reasons": status["replay"]["native_reasons"],
        }

    def _fingerprints(self) -> None:
        refitted, fresh = self._client.fingerprint(), self._fresh.fingerprint()
        self._hold(refitted.numbers == fresh.numbers, "other numbers", "refitted equals fresh")
        self._hold(not refitted.differing, refitted.differing, "nothing differs over ranks")

    def _hosts_client(self) -> None:
        """By SGLang's own serializer, a tensor a name, with the flush at the end."""
        from sglang.srt.utils import MultiprocessingSerializer

        sent = self._sent("first", torch.bfloat16, self._device)
        parts = [sent[: len(sent) // 2], sent[len(sent) // 2 :]]
        for part in parts:
            self._post(
                "/update_weights_from_tensor",
                serialized_named_tensors=[
                    MultiprocessingSerializer.serialize(part, output_str=True)
                ],
                flush_cache=part is parts[-1],
            )
        self._compare("first", self._client.status())

    def _nan(self) -> None:
        """It is refused by name, and the state says so."""
        weights = dict(self._sent("second", torch.float32, self._device))
        name = next(name for name in weights if name.endswith("down_proj.weight"))
        weights[name] = weights[name].clone()
        weights[name].view(-1)[0] = float("nan")
        try:
            self._client.update(weights.items())
        except RefitError as error:
            self._hold(name in str(error), str(error), f"it names {name}")
            self._hold(self._state() == "failed", self._state(), "then the state is failed")
            return
        raise RefitError(name, "a NaN was accepted", "it is refused by name", "See the log.")

    def _colocated(self) -> dict[str, Any]:
        """Release, resume, refit: what veRL does at each step. Replayed, as any other."""
        self._post("/release_memory_occupation")
        self._post("/resume_memory_occupation")
        self._hold(self._state() != "whole", "whole", "what was released has to come again")
        found = self._update("second", bucket_bytes=_SMALL_BUCKET)
        self._hold(not found["native"], found, "its buckets are replayed")
        return found

    def _log(self) -> dict[str, Any]:
        """How often graphs were captured, and errors that nobody was told."""
        log = self.servers[0].log_path.read_text(errors="replace")
        return {
            "captures": captures_in(log),
            "tracebacks": log.count("Traceback (most recent call"),
        }

    # -- parts -----------------------------------------------------------------------------------------

    def _sent(
        self, which: str, dtype: torch.dtype, device: torch.device
    ) -> list[tuple[str, torch.Tensor]]:
        return [(name, one.to(device, dtype)) for name, one in self._weights[which].items()]

    def _compare(self, which: str, status: dict[str, Any]) -> None:
        self._hold(status["state"] == "whole", status["problems"], "a full refit is whole")
        found = differences(ask(self._client, self._prompts), self._expected[which])
        self._hold(not found, found, "refitted equals fresh")

    def _state(self) -> str:
        return self._client.status()["state"]

    def _post(self, path: str, **body: Any) -> None:
        answer = requests.post(self._client.url + path, json=body, timeout=self._timeout)
        self._hold(answer.ok, answer.text[:500], f"{path} is answered")

    def _hold(self, holds: bool, value: object, rule: str) -> None:
        if not holds:
            raise RefitError(
                self.configuration.name, str(value), rule, f"See {self.servers[0].log_path}."
            )
