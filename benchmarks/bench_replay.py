"""C3 and C4: what does a refit of a model with 18,624 names cost, host and all?

    python benchmarks/bench_replay.py [--layers 48] [--json FILE]

A Qwen3-MoE with the layers and experts of Qwen3-30B-A3B (48 × 128) and matrices of one 128×128
block, so that the names cost what they cost there and the bytes next to nothing; it starts with
dummy weights. Three ways through the same engines, timed alternately from the bytes of a request,
still pickled, to "weights ready", all in one bucket:

- `replayed`: this package, from its recipe
- `native`: this package with `replay: false`, through SGLang's `load_weights`; what the loaders
  of SGLang's layers do was learnt at the start, from the names of the checkpoint
- `bf16`: SGLang without quantization

and the host's share alone (C3): the replay without its casts, for a bucket whose layout comes as
text (`RefitClient`), as SGLang's pickled objects (its own clients), or as separate tensors, which are
timed from unpickled ones on; and SGLang's scan without its copies.
Bytes first: replayed and native have to agree on every parameter, and what counts as replayed has to be counted
so by the engine, or no number is printed.
"""

from __future__ import annotations

import pickle
import platform
import statistics
import sys
import tempfile
import time
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from rich.console import Console
from rich.progress import Progress

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

import measured
from host_log import host_log
from outcome import SLOWER
from shapes import many_names
from support.engine import commands
from support.engine.engine_host import EngineHost
from support.replayed import replay_of

from sglang_fp8rl.lab.testing.checkpoints import make_state_dict, save_checkpoint
from sglang_fp8rl.lab.testing.layouts import to_text

MS = 1e3
# What C3 and C4 ask for (ms, ratios).
MAX_FLAT_MS, MAX_SEPARATE_MS = 3.0, 25.0
MIN_SCAN_RATIO, MIN_NATIVE_RATIO, MIN_BF16_RATIO = 50.0, 2.0, 1.0
MAX_NATIVE_TO_BF16 = 3.5
FULL_NAMES = 18_000

_state: dict[str, Any] = {}


# -- inside a scheduler -------------------------------------------------------------------------


def make_bucket(scheduler: Any, shapes: dict[str, tuple[int, ...]], seed: int) -> int:
    """Fill one flattened BF16 bucket under these names; returns its bytes."""
    from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorMetadata

    generator, start, metadata = torch.Generator().manual_seed(seed), 0, []
    for name, shape in shapes.items():
        size = 2 * int(np.prod(shape))
        one = (name, torch.Size(shape), torch.bfloat16, start, start + size, size)
        metadata.append(FlattenedTensorMetadata(*one))
        start += size
    values = torch.empty(start // 2, dtype=torch.bfloat16).normal_(generator=generator)
    _state["bucket"] = {"flattened_tensor": values.view(torch.uint8), "metadata": metadata}
    return start


def load(scheduler: Any, as_text: bool = False) -> float:
    """Seconds from the received bytes to the weights in place."""
    from sglang.srt.utils import MultiprocessingSerializer

    from sglang_fp8rl.engine.host.update_request import collector_paused

    payload = dict(_state["bucket"])
    if as_text:
        payload["metadata"] = to_text(payload["metadata"])
    data = MultiprocessingSerializer.serialize(payload)
    updater = scheduler.tp_worker.model_runner.weight_updater
    with _during_an_update(scheduler), collector_paused():
        began = time.perf_counter()
        updater._update_weights_from_flattened_bucket(MultiprocessingSerializer.deserialize(data))
        return time.perf_counter() - began


def load_separate(scheduler: Any) -> float:
    """The same through a list of tensors."""
    from sglang_fp8rl.engine.host.update_request import collector_paused

    flat = _state["bucket"]["flattened_tensor"]
    tensors = [
        (m.name, flat[m.start_idx : m.end_idx].view(m.dtype).reshape(m.shape))
        for m in pickle.loads(pickle.dumps(_state["bucket"]["metadata"]))  # as if just received
    ]
    model = commands.model_of(scheduler)
    with _during_an_update(scheduler), collector_paused():
        began = time.perf_counter()
        model.load_weights(tensors)
        return time.perf_counter() - began


def _during_an_update(scheduler: Any) -> AbstractContextManager[Any]:
    """As within a request of `update_weights_from_tensor`."""
    from sglang_fp8rl.engine.arrival.update import Origin, Update

    refit = getattr(commands.model_of(scheduler), "fp8rl_refit", None)
    return nullcontext() if refit is None else refit.during(Update(Origin.TENSOR))


def set_replay(scheduler: Any, on: bool) -> None:
    refit = commands.model_of(scheduler).fp8rl_refit
    refit.options = refit.options.model_copy(update={"replay": on})


def host_only(scheduler: Any, how: str) -> float:
    """A replay whose table is not run: finding the recipe, and the bookkeeping."""
    from sglang_fp8rl.numerics.cpu.table import CpuTable

    run = CpuTable.run
    CpuTable.run = lambda self, addresses: self._flags  # type: ignore[method-assign]
    try:
        return load_separate(scheduler) if how == "separate" else load(scheduler, how == "text")
    finally:
        CpuTable.run = run  # type: ignore[method-assign]


def scan_only(scheduler: Any) -> float:
    """SGLang's `load_weights` with loaders that do nothing: names, and nothing else."""
    model = commands.model_of(scheduler)
    loaders = {}
    for name, parameter in model.named_parameters():
        attribute = "_weight_loader" if hasattr(parameter, "_weight_loader") else "weight_loader"
        loaders[name] = (parameter, attribute, getattr(parameter, attribute, None))
        setattr(parameter, attribute, lambda *_, **__: None)
    try:
        return load(scheduler)
    finally:
        for parameter, attribute, loader in loaders.values():
            if loader is None:
                delattr(parameter, attribute)
            else:
                setattr(parameter, attribute, loader)


def build_plan(scheduler: Any) -> float:
    """Seconds that making the recipe takes, of a load that is recorded."""
    replay = replay_of(commands.model_of(scheduler).fp8rl_refit)
    before, stored, seconds = dict(vars(replay)), replay.stored, []

    def timed(call: Any) -> None:
        began = time.perf_counter()
        stored(call)
        seconds.append(time.perf_counter() - began)

    replay.__init__(replay.refit)
    replay.stored = timed
    try:
        load(scheduler)
    finally:
        vars(replay).clear()
        vars(replay).update(before)
    return seconds[0]


def plan_counts(scheduler: Any) -> dict[str, Any]:
    return commands.status(scheduler)["replay"]


# -- outside ------------------------------------------------------------------------------------


def timed_replay(
    time_it: Any, shown: Console, host: EngineHost, what: str, function: Any, *args: Any
) -> None:
    """Time what has to be a replay, or print no number."""
    before = host.call(plan_counts)["calls"]
    time_it(host, what, function, *args)
    if host.call(plan_counts)["calls"] != before + 1:
        shown.print(f"[red]{what}: nothing was replayed: no number[/red]")
        raise typer.Exit(1)


def main(
    layers: Annotated[int, typer.Option(help="decoder layers, 128 experts each")] = 48,
    repetitions: Annotated[int, typer.Option(help="timed runs of each")] = 9,
    native_repetitions: Annotated[int, typer.Option(help="of the slow native path")] = 3,
    json_path: Annotated[Path | None, typer.Option("--json", help="append a JSON line")] = None,
) -> None:
    """Time the replay of 18,624 names; exit 1 if bytes differ."""
    console = Console()
    config = many_names(layers)
    with (
        host_log("bench-replay") as shown,
        tempfile.TemporaryDirectory() as directory,
        Progress(console=shown) as progress,
    ):
        task = progress.add_task("making names", total=4 + 6 * repetitions + 2 * native_repetitions)
        state = make_state_dict(config)
        shapes = {name: tuple(weight.shape) for name, weight in state.items()}
        path = save_checkpoint(Path(directory), config, state, dtype=torch.bfloat16)
        dummy = ("--load-format", "dummy")
        progress.update(task, advance=1, description="starting engines")
        times: dict[str, list[float]] = {}

        def time_it(host: EngineHost, what: str, function: Any, *args: Any) -> None:
            times.setdefault(what, []).append(host.call(function, *args))
            progress.update(task, advance=1, description=what)

        with (
            EngineHost(path, args=dummy) as fp8,
            EngineHost(path, quantization=None, args=dummy) as bf16,
        ):
            replay_it = partial(timed_replay, time_it, shown, fp8)
            nbytes = fp8.call(make_bucket, shapes, 1)
            bf16.call(make_bucket, shapes, 1)
            fp8.call(set_replay, False)
            time_it(fp8, "native, first", load)
            expected = fp8.call(commands.digests)
            fp8.call(set_replay, True)
            time_it(fp8, "recorded", load)
            fp8.call(make_bucket, shapes, 2)
            fp8.call(load)
            fp8.call(make_bucket, shapes, 1)
            replay_it("replayed", load)
            if fp8.call(commands.digests) != expected:
                shown.print("[red]replayed and native bytes differ: no number[/red]")
                raise typer.Exit(1)
            fp8.call(set_replay, False)
            fp8.call(make_bucket, shapes, 2)
            fp8.call(load)
            fp8.call(make_bucket, shapes, 1)
            fp8.call(load)
            fp8.call(set_replay, True)
            if fp8.call(commands.digests) != expected:
                shown.print(
                    "[red]native bytes of the first and a later load differ: no number[/red]"
                )
                raise typer.Exit(1)
            bf16.call(load)
            fp8.call(load_separate)
            fp8.call(load, True)
            for repetition in range(repetitions):
                replay_it("replayed", load)
                time_it(bf16, "bf16", load)
                for how in ("text", "flat", "separate"):
                    replay_it(f"host, {how}", host_only, how)
                time_it(bf16, "scan", scan_only)
                if repetition < native_repetitions:
                    fp8.call(set_replay, False)
                    time_it(fp8, "native", load)
                    fp8.call(set_replay, True)
                    time_it(fp8, "plan built", build_plan)
            counted = fp8.call(plan_counts)

    median = {what: MS * statistics.median(values) for what, values in times.items()}
    ratios = {
        "scan_to_text": median["scan"] / median["host, text"],
        "scan_to_flat": median["scan"] / median["host, flat"],
        "native_to_replayed": median["native"] / median["replayed"],
        "bf16_to_replayed": median["bf16"] / median["replayed"],
        "bf16_to_native": median["bf16"] / median["native"],
    }
    table = measured.table(
        f"{len(shapes):,} names, {nbytes / 1e6:.0f} MB of BF16 in one bucket",
        ("what", "median ms", "fastest ms", "µs per name"),
    )
    for what, values in times.items():
        cells = (median[what], MS * min(values), MS * median[what] / len(shapes))
        table.add_row(what, *(f"{cell:,.2f}" for cell in cells))
    console.print(table)
    console.print(
        f"C3: host {median['host, text']:.2f} ms as RefitClient sends a bucket (target "
        f"{MAX_FLAT_MS}), {median['host, flat']:.2f} ms as SGLang's own clients do, "
        f"{median['host, separate']:.1f} ms as separate tensors (target {MAX_SEPARATE_MS}); "
        f"SGLang's scan takes {ratios['scan_to_text']:.0f} × and {ratios['scan_to_flat']:.0f} × as "
        f"long (target {MIN_SCAN_RATIO:.0f})\n"
        f"C4: native / replayed = {ratios['native_to_replayed']:.1f} (target {MIN_NATIVE_RATIO}), "
        f"SGLang's BF16 load / replayed = {ratios['bf16_to_replayed']:.1f} (target > 1), native / "
        f"BF16 load = {1 / ratios['bf16_to_native']:.1f} (target at most {MAX_NATIVE_TO_BF16})"
    )
    console.print(f"recipes {counted['recipes']}, tensors not replayed {counted['native_reasons']}")
    record = {
        "benchmark": "replay",
        "names": len(shapes),
        "bytes_bf16": nbytes,
        "median_ms": median,
        "ratios": ratios,
        "repetitions": repetitions,
        "machine": platform.machine(),
    }
    measured.append(json_path, [record], **measured.versions("sglang", "torch"))
    missed = below_target(ratios, len(shapes))
    if missed:
        console.print(f"below target: {', '.join(missed)}")
        raise typer.Exit(SLOWER)


def below_target(ratios: dict[str, float], names: int) -> list[str]:
    """The ratios that are less than what is wanted."""
    wanted: tuple[tuple[str, float], ...] = (
        ("scan_to_text", MIN_SCAN_RATIO),
        ("scan_to_flat", MIN_SCAN_RATIO),
        ("native_to_replayed", MIN_NATIVE_RATIO),
        ("bf16_to_replayed", MIN_BF16_RATIO),
        ("bf16_to_native", 1 / MAX_NATIVE_TO_BF16),
    )
    if names < FULL_NAMES:
        # What a refit costs whatever it brings weighs more among few names.
        wanted = wanted[2:]
    return [name for name, bound in wanted if ratios[name] < bound]


if __name__ == "__main__":
    typer.run(main)
