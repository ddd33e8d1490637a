"""C7: what does a client spend on each tensor of a refit, before the server sees anything?

The names of Qwen3-30B-A3B with one row of 128 each, in 30 buckets: as a list, as an iterator, and by SGLang's own client
(`FlattenedTensorBucket`). Every way's buckets are read as a server reads them, and give back what was sent, or no number
is printed.

    python benchmarks/bench_client.py [--layers 48] [--repetitions 10] [--json FILE]

Seconds are of the one thread that does it (`time.thread_time`), which holds its tensors already.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Annotated, Any

import measured
import torch
import typer
from outcome import SLOWER
from rich.console import Console
from sglang.srt.utils import MultiprocessingSerializer
from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorBucket
from shapes import many_names

from sglang_fp8rl.lab.testing.checkpoints import make_state_dict
from sglang_fp8rl.wire.bucket import buckets_of
from sglang_fp8rl.wire.layout_text import from_text
from sglang_fp8rl.wire.listed import Listed
from sglang_fp8rl.wire.sendable import sendable
from sglang_fp8rl.wire.staging import StagingBuffers

BUCKETS, MAX_RATIO = 30, 1.0
Named = list[tuple[str, torch.Tensor]]
Seen = Callable[[torch.Tensor, Any], None]  # of each bucket its memory and its layout


def ours(buckets: Iterable[tuple[Any, bool]], see: Seen | None) -> None:
    for bucket, _ in buckets:
        content = bucket.payload(1, True).content
        if see is not None:
            see(bucket.flat, from_text(content["metadata"]))


def listed(named: Named, limit: int) -> Iterable[tuple[Any, bool]]:
    found = Listed.of(named)
    assert found is not None  # each of them is plain
    return found.buckets(limit, StagingBuffers())


def sglangs(named: Named, limit: int, see: Seen | None) -> None:
    first, nbytes = 0, 0
    for at, (_, tensor) in enumerate(named):
        nbytes += tensor.nbytes
        if nbytes >= limit or at + 1 == len(named):
            made = FlattenedTensorBucket(named_tensors=named[first : at + 1])
            flat, metadata = made.get_flattened_tensor(), made.get_metadata()
            content = {"flattened_tensor": flat, "metadata": metadata}
            MultiprocessingSerializer.serialize(content, output_str=True)
            if see is not None:
                see(flat, metadata)
            first, nbytes = at + 1, 0


def check(way: str, run: Callable[[Seen | None], None], named: Named) -> None:
    """Raise `SystemExit` unless the buckets of a way hold what was sent, in its order."""
    found: Named = []

    def see(flat: torch.Tensor, metadata: Any) -> None:
        bucket = FlattenedTensorBucket(flattened_tensor=flat, metadata=metadata)
        found.extend((name, tensor.clone()) for name, tensor in bucket.reconstruct_tensors())

    run(see)
    is_same = [name for name, _ in found] == [name for name, _ in named] and all(
        one.dtype == sent.dtype and torch.equal(one, sent)
        for (_, one), (_, sent) in zip(found, named, strict=True)
    )
    if not is_same:
        raise SystemExit(f"{way}: its buckets hold something else; no number is worth anything")


def thread_seconds(run: Callable[[], Any]) -> float:
    began = time.thread_time()
    run()
    return time.thread_time() - began


def main(
    layers: Annotated[int, typer.Option()] = 48,
    repetitions: Annotated[int, typer.Option(min=2)] = 10,
    json_path: Annotated[Path | None, typer.Option("--json", help="Append one line.")] = None,
) -> None:
    """A client's seconds for each tensor, by way."""
    torch.set_num_threads(1)
    weights = make_state_dict(many_names(layers), seed=0)
    named = [(name, tensor.reshape(-1)[:128].bfloat16()) for name, tensor in weights.items()]
    limit = sum(tensor.nbytes for _, tensor in named) // BUCKETS
    ways: dict[str, Callable[[Seen | None], None]] = {
        "a list": lambda see: ours(listed(named, limit), see),
        "an iterator": lambda see: ours(
            buckets_of(sendable(iter(named)), limit, 0, StagingBuffers()), see
        ),
        "SGLang's client": lambda see: sglangs(named, limit, see),
    }
    for way, run in ways.items():
        check(way, run, named)
    runs = {way: (lambda run=run: run(None)) for way, run in ways.items()}
    seconds = measured.interleaved(runs, repetitions, thread_seconds)
    least = {way: min(one) for way, one in seconds.items()}
    table = measured.table(f"{len(named)} tensors", ("way", "µs a tensor", "s", "× SGLang's"))
    for way, one in least.items():
        ratio = one / least["SGLang's client"]
        table.add_row(way, f"{one / len(named) * 1e6:.1f}", f"{one:.3f}", f"{ratio:.2f}")
    Console(width=None if sys.stdout.isatty() else 100).print(table)
    medians = {way: statistics.median(one) for way, one in seconds.items()}
    record = {"benchmark": "client", "tensors": len(named), "least_s": least, "median_s": medians}
    measured.append(json_path, [record], **measured.versions("sglang", "torch"))
    if least["a list"] > MAX_RATIO * least["SGLang's client"]:
        raise SystemExit(SLOWER)


if __name__ == "__main__":
    typer.run(main)
