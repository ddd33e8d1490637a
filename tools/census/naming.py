"""The names that a small model is loaded from: of `transformers`, and as SGLang's own loader takes them.

Which names are taken is asked of SGLang without this quantization method. A name is laid aside only because
that takes none of its kind; what it takes and the method refuses is a refusal, and nothing else.
"""

from __future__ import annotations

import math
import re
from typing import Any, NamedTuple

import torch

from .called import LEFT
from .host import Builder
from .names import Sent, Shapes, called, fused_names, of_loader, of_transformers
from .outcome import Row, line_of

_PERIOD = 1_048_573  # a prime: no row of a matrix is a multiple of it
LARGER = (
    4  # times the model's own size: `transformers` did not take the small sizes from its config
)
ENOUGH = 0.75  # of its parameters have to be reached, or nothing is known of the class


class Loaded(NamedTuple):
    """A quantized model that took `shapes`."""

    model: Any
    refit: Any
    shapes: Shapes

    @property
    def takers(self) -> set[int]:
        """Parameters that a checkpoint fills."""
        return {
            id(one)
            for one in self.refit.targets.values()
            if isinstance(one.parameter, torch.nn.Parameter)
            and not one.name.endswith(("_scale", "_scale_inv"))
        }

    @property
    def landed(self) -> set[int]:
        """Those that were reached."""
        known = self.refit.names.known.values()
        return {id(one.target) for name in known for one in name.landings} & self.takers

    def loadable(self, architecture: str) -> int:
        """How many of them SGLang's own loader would fill."""
        left = next((one for who, one in LEFT.items() if re.fullmatch(who, architecture)), "(?!)")
        names = (one.name for one in self.refit.targets.values() if id(one) in self.takers)
        return sum(not re.match(left, name) for name in names)

    @property
    def unreached(self) -> list[str]:
        missing = self.takers - self.landed
        return [one.name for one in self.refit.targets.values() if id(one) in missing]


def loaded(builder: Builder, plain: Any, row: Row) -> Loaded | None:
    """A loaded model, by the names that reach most of it; None if they reach too little, which the row says.

    Names of `transformers` come first; what they do not reach is named as its loader does.

    Args:
        plain: the model without quantization; it is written into.

    Raises:
        Fp8RlError: the method refuses what SGLang takes.
    """
    best: Loaded | None = None
    whole = called(row.architecture, of_loader(plain, "."))
    own = called(row.architecture, of_loader(plain, fused_names(row.architecture)))
    for source in ("transformers", "both", "its loader", "its modules"):
        try:
            shapes = _taken(plain, _named(source, row.architecture, builder, (own, whole), best))
        except Exception as error:  # noqa: BLE001  the row says it
            row.reasons.append(f"names of {source}: {line_of(error)}")
            continue
        if not shapes:
            continue
        found = _loaded(builder, shapes)
        if len(found.landed) > row.reached:
            row.reached, row.held, row.named_by = len(found.landed), len(found.takers), source
            best = found
        if best is not None and row.reached == row.held:
            break
    if best is not None and row.reached >= ENOUGH * best.loadable(row.architecture):
        row.reasons, row.unreached = [], best.unreached
        return best
    if best is not None or not row.reasons:
        row.reasons.append(f"its names reach {row.reached} of {row.held} parameters")
    return None


def loaded_by(builder: Builder, plain: Any, names: Shapes, row: Row) -> Loaded | None:
    """A model of one rank, loaded by names that are known; None if SGLang itself can't, which the row says.

    Args:
        plain: the model without quantization; it is written into.

    Raises:
        Exception: the method refuses what SGLang takes.
    """
    error = _error_of(plain, names)
    if error is not None:
        row.reasons = [f"SGLang's own load: {line_of(error)}"]
        return None
    found = _loaded(builder, names)
    row.reached, row.held, row.unreached = len(found.landed), len(found.takers), found.unreached
    return Loaded(found.model, found.refit, names)  # all of them: an expert may be another rank's


def _loaded(builder: Builder, shapes: Shapes) -> Loaded:
    model, refit = builder.build()
    builder.load(model, list(weights(shapes, 0).items()))
    known = {name: one for name, one in shapes.items() if name in refit.names.known}
    return Loaded(model, refit, known)


def _named(
    source: str,
    architecture: str,
    builder: Builder,
    models: tuple[Shapes, Shapes],
    best: Loaded | None,
) -> Shapes:
    """`models`: what the model calls its parameters, in parts and whole."""
    if source == "transformers":
        found = of_transformers(architecture, builder.path)
        return found if _size(found) < LARGER * _size(models[1]) else {}
    own = models[source == "its modules"]
    if source == "its loader":
        return own
    if best is None:
        return own if source == "its modules" else {}
    left = set(best.unreached)
    return best.shapes | {name: one for name, one in own.items() if one.owner in left}


def _size(shapes: Shapes) -> int:
    return sum(math.prod(one.shape) for one in shapes.values())


def _taken(plain: Any, shapes: Shapes) -> Shapes:
    """Those that SGLang's own loader of the model takes.

    Raises:
        Exception: what SGLang raises, where leaving out names that it does not take one by one is no help.
    """
    if not shapes or _error_of(plain, shapes) is None:
        return shapes
    alone = {name: one for name, one in shapes.items() if _error_of(plain, {name: one}) is None}
    error = _error_of(plain, alone or shapes)
    if error is not None:
        raise error
    return alone


def _error_of(plain: Any, shapes: Shapes) -> Exception | None:
    try:
        with torch.no_grad():
            plain.load_weights(iter(weights(shapes, 0).items()))
    except Exception as error:  # noqa: BLE001  any: it is SGLang's
        return error
    return None


def weights(shapes: Shapes, seed: int) -> dict[str, torch.Tensor]:
    """Every tensor, new at every seed, of a size that keeps a forward pass finite."""
    made = {}
    for at, (name, one) in enumerate(shapes.items()):
        generator = torch.Generator().manual_seed(1_000_003 * (seed + 1) + at)
        made[name] = _values(one, generator)
    return made


def _normal(count: int, generator: torch.Generator) -> torch.Tensor:
    """Many are the same few over again, so that it is fast; no two rows are alike."""
    values = torch.randn(min(count, _PERIOD), generator=generator)
    return values if count <= _PERIOD else values.repeat(count // _PERIOD + 1)[:count]


def _values(one: Sent, generator: torch.Generator) -> torch.Tensor:
    shape, dtype = one.shape, one.dtype
    if not dtype.is_floating_point:
        return torch.randint(0, 2, shape, generator=generator).to(dtype)
    values = _normal(math.prod(shape), generator).reshape(shape)
    if len(shape) > 1:  # a matrix: its products are as large as what it is given
        return values.div_(math.sqrt(shape[-1])).to(dtype)
    return values.mul_(0.1).add_(1.0).to(dtype)
