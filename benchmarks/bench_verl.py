"""C5: what does veRL's refit of a model with 18,867 names cost, from `update_weights` on?

    python benchmarks/bench_verl.py [--layers 48] [--json FILE]

The model of `bench_replay.py` (names of Qwen3-30B-A3B, matrices of one block) on real servers, the sender
in a process of its own as in a trainer of veRL: its `ServerAdapter`, its buckets, HTTP. Timed alternately
from the call of `update_weights` in the trainer to its return, when the weights are ready:

- `stock`: veRL's own code, which pickles every tensor by itself, to a server of this package
- `flat`: this package's adapter, to the same server
- `bf16`: veRL's own code to SGLang without quantization (in a session where SGLang wants one)

Bytes first: after `stock` and after `flat` the server has the same fingerprint, or no number is printed.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import measured
import torch
import typer
from outcome import SLOWER
from rich.console import Console
from shapes import many_names
from verl_trainer.names import CPU_PLATFORM

from sglang_fp8rl.client import RefitClient
from sglang_fp8rl.lab.testing.checkpoints import make_state_dict, save_checkpoint
from sglang_fp8rl.lab.testing.ports import free_port
from sglang_fp8rl.lab.testing.server import ServerProcess, cpu_env

# Before SGLang and veRL are imported, which take the device from their platforms.
os.environ.update(cpu_env() | CPU_PLATFORM)
sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

MIN_RATIO = 5.0
BUCKET_BYTES = 2048 << 20  # veRL's default
FULL_NAMES = 18_000


class Sender:
    """A trainer of one rank, and the seconds of its last refit by where they went."""

    def __init__(self, url_port: int, path: Path) -> None:
        from support.server.verl_trainer import NAMES, Adapter
        from torch.distributed.device_mesh import init_device_mesh
        from verl.workers.rollout.sglang_rollout import sglang_rollout as verls

        engine = verls.AsyncHttpServerAdapter(
            model_path=str(path),
            host="127.0.0.1",
            port=url_port,
            launch_server=False,
            trust_remote_code=False,
            timeout=600,
        )
        mesh = init_device_mesh("cpu", (1, 1, 1), mesh_dim_names=NAMES)

        class Stock(Adapter):
            _is_cut_by_verl = True

        self._stock = Stock(engine, mesh, BUCKET_BYTES)
        self._flat = Adapter(engine, mesh, BUCKET_BYTES)

    def stock(self, weights: Any) -> None:
        """By veRL's own code."""
        asyncio.run(self._stock.update_weights(weights))

    def flat(self, weights: Any) -> None:
        """By this package's adapter."""
        asyncio.run(self._flat.update_weights(weights))


@contextmanager
def _waiting() -> Iterator[list[float]]:
    """Collects the seconds of every request that carries weights."""
    from verl.workers.rollout.sglang_rollout.http_server_engine import AsyncHttpServerAdapter

    from sglang_fp8rl.client.connection import Connection

    seconds: list[float] = []

    @contextmanager
    def timed(endpoint: str) -> Iterator[None]:
        began = time.perf_counter()
        try:
            yield
        finally:
            if endpoint.endswith("update_weights_from_tensor"):
                seconds.append(time.perf_counter() - began)

    async def by_verl(self: Any, endpoint: str, *args: Any, **kwargs: Any) -> Any:
        with timed(endpoint):
            return await saved[0](self, endpoint, *args, **kwargs)

    def by_us(self: Any, endpoint: str, *args: Any, **kwargs: Any) -> Any:
        with timed(endpoint):
            return saved[1](self, endpoint, *args, **kwargs)

    saved = AsyncHttpServerAdapter._make_async_request, Connection.post
    AsyncHttpServerAdapter._make_async_request = by_verl
    Connection.post = by_us  # type: ignore[method-assign, assignment]
    try:
        yield seconds
    finally:
        AsyncHttpServerAdapter._make_async_request, Connection.post = saved  # type: ignore[method-assign]


def refit(
    send: Any, state: dict[str, torch.Tensor], client: RefitClient | None
) -> dict[str, float]:
    """Seconds of one refit: `total`; `request` of it, and `load_weights` of that where it is told."""
    # As `full_tensor()` makes them: memory of its own for each, nothing of it shared yet.
    weights = [(name, weight.clone()) for name, weight in state.items()]
    with _waiting() as requests:
        began = time.perf_counter()
        send(iter(weights))
        total = time.perf_counter() - began
    found = {"total": total, "request": sum(requests)}
    if client is not None:
        status = client.status()
        assert status["consistent"], status["problems"]
        assert status["last_refit"]["complete"], status["last_refit"]
        found["load_weights"] = status["last_refit"]["seconds"]
    return found


def main(
    layers: Annotated[int, typer.Option(help="decoder layers, 128 experts each")] = 48,
    repetitions: Annotated[int, typer.Option(help="timed runs of each")] = 3,
    json_path: Annotated[Path | None, typer.Option("--json", help="append a JSON line")] = None,
) -> None:
    """Time veRL's refit by its stock path and by flattened buckets; exit 1 if bytes differ."""
    from sglang_fp8rl.verl_rollout.adapter import prepare_rank

    console = Console(width=None if Console().is_terminal else 100)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    torch.distributed.init_process_group("gloo", rank=0, world_size=1)
    prepare_rank()
    config = many_names(layers)
    states = [
        {name: weight.bfloat16() for name, weight in make_state_dict(config, seed=seed).items()}
        for seed in (1, 2)
    ]
    times: dict[str, list[dict[str, float]]] = {"stock": [], "flat": [], "bf16": []}
    with tempfile.TemporaryDirectory() as directory:
        path = save_checkpoint(Path(directory) / "model", config, {"nothing": torch.zeros(1)})
        flags = ("--load-format=dummy",)
        ours = ServerProcess(
            path,
            (*flags, "--quantization=fp8_blockwise_online"),
            log_path=Path(directory) / "fp8.log",
        )
        plain = ServerProcess(path, flags, log_path=Path(directory) / "bf16.log")
        with ours, plain:
            client = RefitClient(ours.url)
            fp8, bf16 = Sender(ours.port, path), Sender(plain.port, path)
            fingerprints = []
            for send in (fp8.stock, fp8.flat):  # the first of each is recorded
                refit(send, states[1], client)
                refit(send, states[0], client)
                fingerprints.append(client.fingerprint())
            if fingerprints[0] != fingerprints[1]:
                console.print("[red]the two ways left different bytes: no number[/red]")
                raise typer.Exit(1)
            refit(bf16.stock, states[0], None)
            for repetition in range(repetitions):
                state = states[repetition % 2]
                times["stock"].append(refit(fp8.stock, state, client))
                times["flat"].append(refit(fp8.flat, state, client))
                times["bf16"].append(refit(bf16.stock, state, None))
    torch.distributed.destroy_process_group()
    names, nbytes = len(states[0]), sum(weight.nbytes for weight in states[0].values())
    report(console, times, names, nbytes, json_path)


def report(
    console: Console,
    times: dict[str, list[dict[str, float]]],
    names: int,
    nbytes: int,
    json_path: Path | None,
) -> None:
    median = {
        way: {part: statistics.median(run[part] for run in runs) for part in runs[0]}
        for way, runs in times.items()
    }
    hosts = measured.versions("sglang", "verl", "torch")
    table = measured.table(
        f"{names:,} names, {nbytes / 1e6:.0f} MB of BF16, veRL {hosts['verl']}",
        ("way", "update_weights s", "trainer s", "request s", "load_weights s"),
    )
    for way, row in median.items():
        load = f"{row['load_weights']:.2f}" if "load_weights" in row else "-"
        trainer = row["total"] - row["request"]
        table.add_row(way, f"{row['total']:.2f}", f"{trainer:.2f}", f"{row['request']:.2f}", load)
    console.print(table)
    ratios = {
        "stock_to_flat": median["stock"]["total"] / median["flat"]["total"],
        "bf16_to_flat": median["bf16"]["total"] / median["flat"]["total"],
    }
    console.print(
        f"C5: stock / flat = {ratios['stock_to_flat']:.1f} (target {MIN_RATIO}), veRL's refit of "
        f"SGLang's BF16 / flat = {ratios['bf16_to_flat']:.1f}; the same fingerprints"
    )
    record = {
        "benchmark": "verl",
        "names": names,
        "bytes_bf16": nbytes,
        "median_s": median,
        "ratios": ratios,
        "repetitions": len(times["flat"]),
    }
    measured.append(json_path, [record], **hosts)
    if ratios["stock_to_flat"] < MIN_RATIO:
        console.print("below target")
        raise typer.Exit(SLOWER)


if __name__ == "__main__":
    typer.run(main)
