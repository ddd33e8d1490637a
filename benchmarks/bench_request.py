"""C6: what does a request cost that brings next to nothing, and a whole refit of it?

Two real servers on the CPU platform: ours, sent to by `RefitClient`, and SGLang's own BF16 one, sent to as SGLang's
own client does it (`FlattenedTensorBucket`, `MultiprocessingSerializer`, a session where there are some). Each
refit brings one norm of other values, timed in turn. Bytes come first: behind a refit either server has to give
back what was sent, or no number is printed.

    python benchmarks/bench_request.py [--repetitions 40] [--json FILE]

`request` is one `/update_weights_from_tensor`, from the first byte of it to its answer; `refit` is all of a client's
work, its session and the making of the bucket included. Times decide nothing here; the number of requests does.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import urlsplit

import measured
import requests
import torch
import torch.multiprocessing
import typer
from host_log import host_log
from outcome import SLOWER
from rich.console import Console

from sglang_fp8rl.client import RefitClient
from sglang_fp8rl.lab.testing.checkpoints import make_config, make_state_dict, save_checkpoint
from sglang_fp8rl.lab.testing.server import ServerProcess

NAME = "model.norm.weight"
UPDATE, INFO = "/update_weights_from_tensor", "/server_info"
MAX_RATIO = 1.2
WARM_UPS = 3


class Requests:
    """Paths, status codes and seconds of what one HTTP session asks."""

    def __init__(self, session: requests.Session) -> None:
        self.seen: list[tuple[str, int, float]] = []
        session.hooks["response"].append(self._see)

    def _see(self, answer: requests.Response, *_: Any, **__: Any) -> None:
        path = urlsplit(answer.url).path
        self.seen.append((path, answer.status_code, answer.elapsed.total_seconds()))


class Ours:
    """`RefitClient`, which lives as long as its trainer."""

    def __init__(self, url: str) -> None:
        self.client = RefitClient(url)
        self.requests = Requests(self.client._connection._http)

    def refit(self, tensor: torch.Tensor) -> None:
        self.client.update([(NAME, tensor)], partial=True)


class Stock:
    """As SGLang's own client sends a flattened bucket, over one HTTP session."""

    def __init__(self, url: str) -> None:
        self.url, self.http = url, requests.Session()
        self.requests = Requests(self.http)
        self.has_sessions = self._post("/begin_weight_update").ok
        if self.has_sessions:
            self._post("/end_weight_update")

    def refit(self, tensor: torch.Tensor) -> None:
        from sglang.srt.utils import MultiprocessingSerializer
        from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorBucket

        if self.has_sessions:
            self._post("/begin_weight_update").raise_for_status()
        flat = FlattenedTensorBucket(named_tensors=[(NAME, tensor)])
        content = {"flattened_tensor": flat.get_flattened_tensor(), "metadata": flat.get_metadata()}
        payload = MultiprocessingSerializer.serialize(content, output_str=True)
        body = {
            "serialized_named_tensors": [payload],
            "load_format": "flattened_bucket",
            "flush_cache": True,
        }
        self._post(UPDATE, body).raise_for_status()
        if self.has_sessions:
            self._post("/end_weight_update").raise_for_status()

    def _post(self, path: str, body: dict[str, Any] | None = None) -> requests.Response:
        return self.http.post(self.url + path, json=body or {}, timeout=60)


Sender = Ours | Stock


def served(server: ServerProcess) -> torch.Tensor:
    """The norm, as the server gives it back."""
    values = server.post("/get_weights_by_name", {"name": NAME, "truncate_size": 1 << 20})
    return torch.tensor(values).flatten()


def timed(sender: Sender, tensor: torch.Tensor) -> tuple[float, float]:
    """Seconds of a refit, and of the request in it that brings the tensor."""
    sender.requests.seen.clear()
    began = time.perf_counter()
    sender.refit(tensor)
    seconds = time.perf_counter() - began
    return seconds, sum(took for path, _, took in sender.requests.seen if path == UPDATE)


def wrong_counts(sender: Sender, refits: int, refit: Callable[[], None]) -> str:
    """What is wrong with the requests of several refits by one client; empty if nothing is."""
    sender.requests.seen.clear()
    for _ in range(refits):
        refit()
    paths = Counter(path for path, _, _ in sender.requests.seen)
    unknown = sum(code == 404 for _, code, _ in sender.requests.seen)
    most = refits * (3 if paths["/begin_weight_update"] else 1)
    if paths[INFO] or unknown or paths.total() != most:
        return f"{refits} refits of a client that knows its server took {dict(paths)}, {unknown} answered 404"
    return ""


def main(
    repetitions: Annotated[int, typer.Option(help="timed refits of each server")] = 40,
    json_path: Annotated[Path | None, typer.Option("--json", help="append JSON lines")] = None,
) -> None:
    """Compare; exit 1 if bytes or the number of requests are wrong."""
    console = Console()
    torch.multiprocessing.set_sharing_strategy("file_system")
    config = make_config("llama")  # whose weights SGLang gives back by name
    first = make_state_dict(config, seed=0)
    values = [(first[NAME].float() + step).to(torch.bfloat16) for step in (1.0, 2.0)]
    with host_log("bench-request") as shown, tempfile.TemporaryDirectory() as directory:
        path = save_checkpoint(Path(directory) / "model", config, first)
        log = Path(directory) / "logs"
        threads = {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
        quantized = ("--quantization=fp8_blockwise_online",)
        with (
            ServerProcess(path, quantized, log_path=log / "ours.log", env=threads) as ours,
            ServerProcess(path, log_path=log / "stock.log", env=threads) as stock,
        ):
            senders: dict[str, Sender] = {}
            for name, make, server in (("ours", Ours, ours), ("stock", Stock, stock)):
                # Not before the other one's turn: SGLang closes a connection that is idle for long.
                sender = senders[name] = make(server.url)
                for value in values * WARM_UPS:
                    sender.refit(value)
                    if not torch.equal(served(server).to(torch.bfloat16), value):
                        shown.print(
                            f"[red]{name} serves other bytes than were sent: no number[/red]"
                        )
                        raise typer.Exit(1)
            wrong = wrong_counts(senders["ours"], 5, lambda: senders["ours"].refit(values[0]))
            seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in senders}
            for repetition in range(repetitions):
                for name, sender in senders.items():
                    seconds[name].append(timed(sender, values[repetition % 2]))
            per_refit = {name: len(sender.requests.seen) for name, sender in senders.items()}
            stages = dict(ours_stages(senders["ours"]))
    rows: list[dict[str, Any]] = []
    ratios: dict[str, float] = {}
    table = measured.table(
        f"One norm of {first[NAME].numel()} values, {repetitions} refits in turn",
        ("what", "who", "median ms", "p10", "p90", "ours / stock"),
        words=2,
    )
    for at, what in enumerate(("refit", "request")):
        spreads = {
            who: measured.spread([one[at] for one in found]) for who, found in seconds.items()
        }
        ratios[what] = spreads["ours"]["median_s"] / spreads["stock"]["median_s"]
        for who, spread in spreads.items():
            row = {"benchmark": "request", "id": "C6", "what": what, "who": who, **spread}
            rows.append(row | {"ours_over_stock": ratios[what], "requests": per_refit[who]})
            numbers = (f"{1e3 * spread[key]:.2f}" for key in ("median_s", "p10_s", "p90_s"))
            table.add_row(what, who, *numbers, f"{ratios[what]:.2f}" if who == "ours" else "")
    rows[0]["stages"] = stages
    console.print(table)
    console.print(f"requests a refit: {per_refit}; the server's seconds of our last one: {stages}")
    hosts = measured.versions("sglang", "torch")
    measured.append(json_path, rows, repetitions=repetitions, commit=measured.commit(), **hosts)
    if wrong:
        console.print(f"[red]{wrong}[/red]")
        raise typer.Exit(1)
    if max(ratios.values()) > MAX_RATIO:
        console.print(f"slower than {MAX_RATIO} × stock SGLang's")
        raise typer.Exit(SLOWER)


def ours_stages(sender: Sender) -> dict[str, float]:
    assert isinstance(sender, Ours)
    return sender.client.status()["last_refit"]["stages"]


if __name__ == "__main__":
    typer.run(main)
