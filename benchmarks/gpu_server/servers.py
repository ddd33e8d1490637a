"""The ways to serve one model, as real SGLang servers."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import torch

from sglang_fp8rl import RefitClient
from sglang_fp8rl.config import QUANTIZATION_METHOD
from sglang_fp8rl.lab.testing.server import ServerProcess
from sglang_fp8rl.wire.bucket import NamedTensor

from .budget import Budget
from .models import Layout, Model, Values, batches, write_config

GIB = 1 << 30
# Beside weights and cache: CUDA context, captured graphs, workspaces of kernels.
_MORE_PER_SERVER = 4 * GIB
# DeepGEMM would otherwise compile a kernel for every M up to 16384 before the first answer.
ENVIRONMENT = {"SGLANG_JIT_DEEPGEMM_PRECOMPILE": "0"}


@dataclass(frozen=True)
class Mode:
    """`what` is the name in tables; `quantization` the server's flag, or None; `args` are more flags."""

    what: str
    quantization: str | None
    args: tuple[str, ...] = ()

    @property
    def is_fp8(self) -> bool:
        return self.quantization is not None

    @property
    def is_ours(self) -> bool:
        return self.quantization == QUANTIZATION_METHOD

    def tensors(self, values: Values, seed: int) -> list[NamedTensor]:
        """What this server takes: pairs where the sender has to quantize."""
        sent_as_pairs = self.is_fp8 and not self.is_ours
        return values.pairs(seed) if sent_as_pairs else values.unquantized(seed)


OURS = Mode("sglang_fp8rl", QUANTIZATION_METHOD)
NATIVE = Mode("sglang fp8", "fp8")
BF16 = Mode("bf16", None)
_IN_BF16 = json.dumps({"quantization_config": {"activations": "bf16"}})
BF16_ACTIVATIONS = Mode(
    "BF16 activations", QUANTIZATION_METHOD, ("--json-model-override-args", _IN_BF16)
)
# Most important first: where the time runs out, the last ones are missing.
MODES = (OURS, BF16, NATIVE, BF16_ACTIVATIONS)


@dataclass(frozen=True)
class Setting:
    """What all servers of a run have in common.

    Attributes:
        directory: for model folders and logs.
        max_batch: of decoding; its powers of two are the captured batch sizes.
        tokens_each: prompt and answer of one request.
        fp8_gemm_backend: SGLang's flag, for the two FP8 servers.
        more: more flags, for every server.
    """

    directory: Path
    device: torch.device
    max_batch: int
    tokens_each: int
    fp8_gemm_backend: str = "auto"
    more: tuple[str, ...] = ()

    def args(self, mode: Mode) -> list[str]:
        found = ["--disable-radix-cache", f"--max-running-requests={self.max_batch}"]
        # A pool of a known size, so that several servers fit on one GPU.
        found += [f"--max-total-tokens={self.max_batch * (self.tokens_each + 64)}"]
        if mode.quantization:
            found.append(f"--quantization={mode.quantization}")
            found.append(f"--fp8-gemm-backend={self.fp8_gemm_backend}")
        found += mode.args
        found += ["--cuda-graph-bs-decode", *map(str, batches(self.max_batch))]
        return [*found, *self.more]

    def server(self, path: Path, mode: Mode, log: str, timeout: float, *more: str) -> ServerProcess:
        """Not started yet."""
        on_gpu = self.device.type == "cuda"
        return ServerProcess(
            path,
            [*self.args(mode), *more],
            log_path=self.directory / f"{log}.log",
            env=ENVIRONMENT if on_gpu else {},
            timeout=timeout,
            on_gpu=on_gpu,
        )


@dataclass
class Served:
    """A running server with its mode and client, and what it said to the prompts."""

    mode: Mode
    server: ServerProcess
    client: RefitClient
    answers: list[tuple[int, ...]] = field(default_factory=list)


@contextlib.contextmanager
def running(servers: Sequence[ServerProcess]) -> Iterator[None]:
    """Start them all at once, and stop them all, whatever happens."""
    # A server dies with the *thread* that started it, so the threads have to live as long.
    with ThreadPoolExecutor(len(servers)) as pool:
        try:
            for _ in pool.map(ServerProcess.start, servers):
                pass
            yield
        finally:
            for server in servers:
                server.stop()


@contextlib.contextmanager
def serving(
    setting: Setting, model: Model, modes: Sequence[Mode], budget: Budget
) -> Iterator[list[Served]]:
    """Servers of these modes with dummy weights, ready for a refit."""
    timeout = max(1.0, budget.left())
    processes = {}
    for mode in modes:
        name = mode.what.replace(" ", "-")
        native = mode.is_fp8 and not mode.is_ours
        path = write_config(setting.directory / f"{model.name}-{name}", model.config(), fp8=native)
        processes[mode] = setting.server(path, mode, name, timeout, "--load-format=dummy")
    with running(list(processes.values())):
        # Not before: a server takes another port where its own is taken meanwhile.
        yield [
            Served(mode, process, RefitClient(process.url, timeout=timeout))
            for mode, process in processes.items()
        ]


def groups_of(layout: Layout, setting: Setting, modes: Sequence[Mode]) -> list[list[Mode]]:
    """All at once where they fit on the GPU, so that runs can be interleaved; else one by one."""
    if setting.device.type != "cuda":
        return [list(modes)]
    free, _ = torch.cuda.mem_get_info(setting.device)
    if bytes_needed(layout, modes) <= 0.7 * free:
        return [list(modes)]
    return [[mode] for mode in modes]


def bytes_needed(layout: Layout, modes: Sequence[Mode]) -> int:
    """Weights and overhead of the servers, and what the sender holds."""
    servers = sum(layout.nbytes(mode.is_fp8) + _MORE_PER_SERVER for mode in modes)
    sender = max(layout.nbytes(fp8=True) if mode == NATIVE else 0 for mode in modes)
    return servers + sender + 4 * GIB
