"""The demo, step by step: serve, refit, refit back, and compare with servers started fresh."""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ...client import RefitClient
from ...compat import installed
from ...config import QUANTIZATION_METHOD
from ...wire.sendable import NamedTensor
from ..plan_table import plan_table
from ..testing.checkpoints import make_checkpoint
from ..testing.outputs import ask, differences, make_prompts
from ..testing.server import ServerProcess
from ..testing.weight_sets import Checkpoint, masters, updated, write_updated
from .show import DemoReport, RefitFigures, Screen

# The demo's own model: small enough for two cores, large enough to have every kind of module.
# 24 × 56 = 1344 rows of gate and up are no multiple of 128: that module goes per channel.
DEMO_MODEL: dict[str, Any] = {
    "hidden_size": 512,
    "intermediate_size": 1344,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 4096,
}
BUCKET_BYTES = 16 << 20  # small, so that the demo's small model takes several
OWN_MODEL_BUCKET_BYTES = 512 << 20
START_TIMEOUT = 1800.0


def run_demo(model: Path | None, directory: Path, screen: Screen) -> DemoReport:
    """Run every step; what differs is in the report, what can't go on is raised.

    Args:
        model: a checkpoint of the user's, or None for the demo's own.
        directory: for checkpoints and logs.

    Raises:
        Fp8RlError: a checkpoint that can't be served, a server that does not start, a refused update.
    """
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # servers are stopped
    has_gpu = torch.cuda.is_available()
    report = DemoReport(
        model=str(model or "the demo's own small Qwen3"),
        device=torch.cuda.get_device_name() if has_gpu else "CPU reference platform",
        sglang=str(installed("sglang")),
        torch=torch.__version__,
        directory=str(directory),
    )
    screen.note(f"SGLang {report.sglang}, torch {report.torch}, serving on: {report.device}")
    first, second = _two_checkpoints(model, directory, screen)
    prompts = make_prompts(first.vocab_size)

    with _server(first, directory / "refitted-server.log") as server:
        with screen.step(f"starting a server with --quantization {QUANTIZATION_METHOD}"):
            server.start()
        client = RefitClient(server.url)
        status = client.status()
        report.plan, report.schemes = status["plan"], status["schemes"]
        report.fp8_bytes = status["fp8_bytes"]
        report.bf16_bytes_replaced = status["bf16_bytes_replaced"]
        screen.console.print(plan_table(report.plan))
        with screen.step("generating with the first weights"):
            fresh_first = ask(client, prompts)
        bucket_bytes = OWN_MODEL_BUCKET_BYTES if model else BUCKET_BYTES
        refit = _Refitting(client, report, screen, first.nbytes, bucket_bytes)
        refit.send("update", updated(first))
        with screen.step("generating with the second weights"):
            refit_second = ask(client, prompts)
        refit.send("back", masters(first))
        with screen.step("generating with the first weights, sent back"):
            refit_first = ask(client, prompts)
    with _server(second, directory / "fresh-server.log") as server:
        with screen.step("starting a fresh server on the second weights"):
            server.start()
        with screen.step("generating with the fresh server"):
            fresh_second = ask(RefitClient(server.url), prompts)

    report.outputs_compared = 2 * len(prompts)
    # A check that can't fail checks nothing: equal outputs of two weight sets are suspicious.
    alike = ["both weight sets give the same outputs"] if fresh_first == fresh_second else []
    updated_text = "updated over HTTP = fresh server on the second weights"
    back_text = "first weights sent back = fresh server on the first weights"
    report.checks = {
        updated_text: differences(refit_second, fresh_second),
        back_text: differences(refit_first, fresh_first),
        "the two weight sets can be told apart": alike,
    }
    return report


@dataclass(frozen=True)
class _Refitting:
    """Sends full updates and takes their figures down."""

    client: RefitClient
    report: DemoReport
    screen: Screen
    total_bytes: int
    bucket_bytes: int

    def send(self, name: str, tensors: Iterator[NamedTensor]) -> None:
        text = f"sending a full FP32 update over HTTP ({name})"
        with self.screen.step(text, nbytes=self.total_bytes) as moved:
            sent = self.client.update(
                tensors,
                bucket_bytes=self.bucket_bytes,
                on_bucket=lambda _, nbytes: moved(nbytes),
            )
        status = self.client.status()
        last = status["last_refit"]
        if not status["consistent"] or not last["complete"]:
            self.report.problems += status["problems"] or [f"{name}: the refit is not complete"]
        self.report.refits.append(
            RefitFigures(
                name=name,
                tensors=sent.tensors,
                nbytes=sent.nbytes,
                buckets=sent.buckets,
                http_seconds=round(sent.server_seconds, 4),
                engine_seconds=last["seconds"],
            )
        )


def _two_checkpoints(
    model: Path | None, directory: Path, screen: Screen
) -> tuple[Checkpoint, Checkpoint]:
    if model is None:
        with screen.step("making a small Qwen3 checkpoint (seeded, no download)"):
            path = make_checkpoint(directory / "first", "qwen3", shards=2, **DEMO_MODEL)
            first = Checkpoint(path)
    else:
        first = Checkpoint(model).check()
    text = "writing the second weights, for the fresh server"
    with screen.step(text, nbytes=first.nbytes) as moved:
        second = write_updated(first, directory / "second", moved)
    return first, second


@contextlib.contextmanager
def _server(checkpoint: Checkpoint, log: Path) -> Iterator[ServerProcess]:
    """A server that is still to be started, as a step of its own, and is stopped whatever happens."""
    args = (f"--quantization={QUANTIZATION_METHOD}", "--disable-radix-cache")
    server = ServerProcess(
        checkpoint.path, args, log_path=log, timeout=START_TIMEOUT, on_gpu=torch.cuda.is_available()
    )
    try:
        yield server
    finally:
        server.stop()
