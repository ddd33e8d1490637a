"""One model class: two refits of a small model, the second replayed, against a fresh one; byte for byte."""

from __future__ import annotations

import re
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from sglang_fp8rl.engine.arrival.update import Origin, Update
from sglang_fp8rl.engine.model.held_tensors import held_tensors
from sglang_fp8rl.errors import Fp8RlError

from .host import Builder
from .names import Sent, Shapes, of_loader, of_transformers
from .outcome import Row

ENOUGH = 0.75  # of its parameters have to be reached, or the class is not judged


def judged(architecture: str, builder: Builder) -> Row:
    """The outcome; whatever the model raises while it is built or loaded is a row too."""
    torch.use_deterministic_algorithms(True, warn_only=True)  # memory that nobody writes is alike
    row = Row(architecture, "not built")
    try:
        builder.build()
    except Fp8RlError as error:
        row.kind, row.reasons = "refused", [_line(error)]
        return row
    except Exception as error:  # noqa: BLE001  the row says it
        row.reasons = [_line(error)]
        return row
    started = _start(architecture, builder, row)
    if started is None:
        return row
    model, refit, shapes = started
    row.names = len(shapes)
    for seed in (1, 2):
        try:
            with refit.during(Update(Origin.TENSOR)):
                model.load_weights(list(_weights(shapes, seed).items()))
        except Fp8RlError as error:
            row.kind, row.reasons = "refused", [_line(error)]
            return row
    counts = refit.recipes.counts
    row.kind = "replayed" if counts.calls else "native"
    row.reasons = sorted(counts.native_reasons)
    fresh, _ = builder.build()
    builder.load(fresh, list(_weights(shapes, 2).items()))
    row.silent = sorted(_differences(model, fresh))
    plain, _ = builder.build(is_quantized=False)
    builder.load(plain, list(_weights(shapes, 2).items()))
    row.silent += [
        f"{one} (of SGLang's own)" for one in sorted(_differences_of_plain(refit, plain))
    ]
    return row


def saved(architecture: str, builder: Builder, directory: Path) -> Row:
    """Checkpoints of three weight sets, for a server: `directory/0`, `1`, `2`; every tensor differs."""
    import shutil

    from safetensors.torch import save_file

    row = Row(architecture, "not built")
    started = _start(architecture, builder, row)
    if started is None:
        return row
    row.kind, row.names = "replayed", len(started[2])
    for seed in range(3):
        path = directory / str(seed)
        path.mkdir(parents=True)
        shutil.copy(Path(builder.path) / "config.json", path)
        save_file(_weights(started[2], seed), path / "model.safetensors")
    return row


def _start(architecture: str, builder: Builder, row: Row) -> tuple[Any, Any, Shapes] | None:
    """A loaded model, by the names that reach most of it; None if none reaches anything.

    Names of `transformers` come first; what they do not reach is named as its loader does.
    """
    best: tuple[Any, Any, Shapes] | None = None
    own = of_loader(builder.build()[0])
    for source in ("transformers", "both", "its loader"):
        try:
            shapes = _named(source, architecture, builder, own, best)
            if not shapes:
                continue
            model, refit, shapes = _loaded(builder, shapes)
        except Exception as error:  # noqa: BLE001  the row says it
            row.reasons.append(f"names of {source}: {_line(error)}")
            continue
        known = {name: shapes[name] for name in shapes if name in refit.names.known}
        reached = len(_landed(refit))
        if reached > row.reached:
            row.reached, row.held, row.named_by = reached, len(_takers(refit)), source
            best = model, refit, known
        if row.reached == row.held:
            break
    if best is not None and row.reached >= ENOUGH * row.held:
        row.reasons = []
        return best
    if best is not None or not row.reasons:
        row.reasons.append(f"its names reach {row.reached} of {row.held} parameters")
    return None


def _loaded(builder: Builder, shapes: Shapes) -> tuple[Any, Any, Shapes]:
    """A model loaded with these names; without those that its loader does not take, if there are any."""
    for attempt in (1, 2):
        model, refit = builder.build()
        try:
            builder.load(model, list(_weights(shapes, 0).items()))
            break
        except Fp8RlError:
            taken = {name: one for name, one in shapes.items() if _is_taken(model, name, one)}
            if attempt == 2 or not taken or len(taken) == len(shapes):
                raise
            shapes = taken
    refit.note_loaded()
    return model, refit, shapes


def _is_taken(model: Any, name: str, one: Sent) -> bool:
    try:
        model.load_weights(list(_weights({name: one}, 0).items()))
    except Fp8RlError:
        return False
    return True


def _named(
    source: str,
    architecture: str,
    builder: Builder,
    own: Shapes,
    best: tuple[Any, Any, Shapes] | None,
) -> Shapes:
    if source == "transformers":
        return of_transformers(architecture, builder.path)
    if source == "its loader":
        return own
    if best is None:
        return {}
    _, refit, known = best
    taken = {target.name for target in refit.targets.values() if id(target) in _landed(refit)}
    return known | {name: one for name, one in own.items() if one.owner not in taken}


def _takers(refit: Any) -> set[int]:
    """Parameters that a checkpoint fills."""
    return {
        id(one)
        for one in refit.targets.values()
        if isinstance(one.parameter, torch.nn.Parameter)
        and not one.name.endswith(("_scale", "_scale_inv"))
    }


def _landed(refit: Any) -> set[int]:
    landings = [one for known in refit.names.known.values() for one in known.landings]
    return {id(one.target) for one in landings} & _takers(refit)


def _weights(shapes: Shapes, seed: int) -> dict[str, torch.Tensor]:
    """Every tensor, new at every seed."""
    made = {}
    for at, (name, (shape, dtype, _)) in enumerate(shapes.items()):
        generator = torch.Generator().manual_seed(1_000_003 * (seed + 1) + at)
        if dtype.is_floating_point:
            made[name] = torch.randn(shape, generator=generator).to(dtype)
        else:
            made[name] = torch.randint(0, 2, shape, generator=generator).to(dtype)
    return made


def _differences(model: Any, fresh: Any) -> Iterator[str]:
    """Places whose bytes, or plain values, are not the same in both."""
    found, expected = _held(model), _held(fresh)
    yield from found.keys() ^ expected.keys()
    for place in found.keys() & expected.keys():
        if not _is_same(found[place], expected[place]):
            yield place


def _differences_of_plain(refit: Any, plain: Any) -> Iterator[str]:
    """Weights in high precision that are not what SGLang's own loader makes of the same tensors."""
    expected = dict(plain.named_parameters()) | dict(plain.named_buffers())
    for target in refit.targets.values():
        other = expected.get(target.name)
        one = target.parameter
        is_alike = other is not None and (one.shape, one.dtype) == (other.shape, other.dtype)
        if not target.is_fp8 and is_alike and not _is_same(one.data, other.data):
            yield target.name


def _held(model: Any) -> dict[str, Any]:
    """Parameters, buffers, every other tensor, and numbers that modules keep."""
    held = held_tensors(model.named_modules())
    found: dict[str, Any] = {
        **dict(model.named_parameters()),
        **{one.place: one.tensor for one in held},
    }
    for prefix, module in model.named_modules():
        for leaf, value in vars(module).items():
            if isinstance(value, (bool, int, float)):
                found[f"{prefix}.{leaf}"] = value
    return found


def _is_same(one: Any, other: Any) -> bool:
    if not isinstance(one, torch.Tensor):
        return one == other or (one != one and other != other)
    if (one.shape, one.dtype, one.device) != (other.shape, other.dtype, other.device):
        return False
    if one.device.type == "meta":
        return True
    return torch.equal(_bytes(one), _bytes(other))


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def _line(error: BaseException) -> str:
    """With the function that raised it, where nothing else says what is wrong."""
    traceback.print_exception(error)  # into the log
    text = re.sub(r"https?://[^\s']+", "…", " ".join(str(error).split()))
    if isinstance(error, Fp8RlError):
        return text[:400]
    frame = traceback.extract_tb(error.__traceback__)[-1]
    place = "" if text else f" in {Path(frame.filename).name}, {frame.name}"
    return f"{type(error).__name__}: {text}"[:400] + place
