"""Models that nobody thought of: their `load_weights` are random programs, by a seed.

`judge.py` says what has to hold of them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from random import Random
from typing import Any

import torch
from torch import nn

from sglang_fp8rl.engine.modules.method import DecidedMethod
from sglang_fp8rl.formats import FORMATS, Format
from sglang_fp8rl.numerics import quantize
from sglang_fp8rl.scheme import Cause, Scheme

Named = Iterable[tuple[str, torch.Tensor]]

SENT: dict[str, tuple[int, ...]] = {
    "a": (6, 4),
    "b": (6, 4),
    "c": (4,),
    "d": (1,),
    "e": (2, 3, 4),
    "f": (),
    "g": (6, 4),
    "h": (128, 64),
    "i": (128, 64),
}
HELD = {"p": (6, 4), "q": (12, 4), "r": (4,), "s": (1,), "u": (2, 3, 4), "v": ()}
STEPS = 4  # of a program, for each name


class Decided(DecidedMethod):
    """The method of a served layer, without a kernel."""

    def __init__(self, held: Format) -> None:
        self.fp8rl_scheme, self.served = Scheme(held, Cause.MISALIGNED, ""), None

    def reads_packed_scales(self, layer: Any) -> bool:
        return False


class Program(nn.Module):
    """What it does with a name follows from a seed, and from the values that it reads.

    Args:
        is_fp8: whether the matrices `w` (a scale a row) and `x` (blocks, of two sent parts) are served in FP8.

    Attributes:
        log: its operations so far.
    """

    def __init__(
        self,
        seed: int,
        left_out: frozenset[str] = frozenset(),
        *,
        is_fp8: bool = False,
    ) -> None:
        super().__init__()
        self.seed, self.left_out, self.log = seed, left_out, []
        for name, shape in HELD.items():
            setattr(self, name, nn.Parameter(torch.zeros(shape), requires_grad=False))
        self.linear = served_layer(torch.zeros(6, 4), is_fp8=is_fp8)
        self.blocks = served_layer(torch.zeros(256, 64), is_fp8=is_fp8)
        self.x.weight_loader = _load_part  # type: ignore[attr-defined]
        self.register_buffer("table", torch.zeros(6, 4))
        self.plain = torch.zeros(6, 4)
        self.kept: dict[str, Any] = {}
        self.wildness = Random(seed).choice([0.0, 0.02, 0.05, 0.1, 0.5])

    @property
    def w(self) -> nn.Parameter:
        return self.linear.weight

    @property
    def x(self) -> nn.Parameter:
        return self.blocks.weight

    def load_weights(self, weights: Named) -> None:
        seen: list[torch.Tensor] = []  # across the names of a call
        late: list[Callable[[], object]] = []
        for name, tensor in weights:
            random = Random(f"{self.seed}.{name}")
            value = self._looked_at(name, tensor, random, seen)
            if random.random() < self.wildness:
                seen.append(value)
            last = self._last_of(name, value, random)
            if last is None:
                continue
            match random.randint(0, 9):
                case 0:
                    late.append(last)
                case 1:
                    thread = threading.Thread(target=last)
                    thread.start()
                    thread.join()
                case _:
                    last()
        for one in late:
            one()

    def _looked_at(
        self, name: str, tensor: torch.Tensor, random: Random, seen: list[torch.Tensor]
    ) -> torch.Tensor:
        """What the program has of a name behind some steps."""
        values = [tensor]
        for step in range(random.randint(1, STEPS)):
            is_wild = random.random() < self.wildness
            if name in ROWS and not is_wild:
                continue  # a part of blocks is mostly whole, or nothing of it could be stored
            act = random.choice(ACTS if is_wild else VIEWS)
            value = random.choice(values + seen[-1:])
            if f"{name}{step}" in self.left_out:
                continue
            self.log.append(f"{name}{step}: {act.__name__}")
            found = act(self, random, value, values)
            if found is not None:
                values.append(found)
        return values[-1]

    def _last_of(
        self, name: str, value: torch.Tensor, random: Random
    ) -> Callable[[], object] | None:
        """How the program writes it."""
        is_wild = random.random() < self.wildness
        write = random.choice(WRITES if is_wild else COPIES)
        if name in self.left_out:
            return None
        self.log.append(f"{name}: {write.__name__}")
        part = getattr(self, random.choice([*HELD, "w", "x"] if is_wild else [OWN[name]]))
        if part is self.x and name in ROWS:
            return self._write_of(into_its_rows, random, ROWS[name], value)
        return self._write_of(write, random, part, value)

    def _write_of(
        self, write: Any, random: Random, part: Any, value: torch.Tensor
    ) -> Callable[[], object]:
        state = random.getstate()

        def act() -> None:
            again = Random()
            again.setstate(state)
            write(self, again, part, value)

        return act


def served_layer(weight: torch.Tensor, *, is_fp8: bool) -> nn.Linear:
    rows, columns = weight.shape
    layer = nn.Linear(columns, rows, bias=False)
    if not is_fp8:
        layer.weight = nn.Parameter(weight, requires_grad=False)
        return layer
    is_blocks = rows > 128
    held = FORMATS["blockwise" if is_blocks else "per_channel"]
    codes, scale = quantize(weight, held.grid(weight.shape).block)
    layer.weight = nn.Parameter(codes, requires_grad=False)
    setattr(layer, held.scale_name("weight"), nn.Parameter(scale, requires_grad=False))
    layer.quant_method = Decided(held)  # type: ignore[assignment]
    return layer


def _load_part(parameter: nn.Parameter, loaded: torch.Tensor, first: int = 0) -> None:
    """As SGLang's fused layers load one of their parts."""
    part = parameter.data.narrow(0, first, loaded.shape[0])
    assert part.shape == loaded.shape
    part.copy_(loaded)


# -- what a program does with what was sent: a view, a copy, a value, or a change of it ------------------


def narrowed(model: Any, random: Random, value: torch.Tensor, values: Any) -> torch.Tensor:
    if not value.dim():
        return value.reshape(1)
    dim = random.randrange(value.dim())
    size = random.randint(min(1, value.shape[dim]), value.shape[dim])
    return value.narrow(dim, random.randint(0, value.shape[dim] - size), size)


def turned(model: Any, random: Random, value: torch.Tensor, values: Any) -> torch.Tensor:
    return value.transpose(0, -1) if value.dim() else value


def flat(model: Any, random: Random, value: torch.Tensor, values: Any) -> torch.Tensor:
    return value.reshape(-1)


def folded(model: Any, random: Random, value: torch.Tensor, values: Any) -> torch.Tensor:
    return value.reshape(-1, 4) if value.numel() % 4 == 0 else value.unsqueeze(0)


def widened(model: Any, random: Random, value: torch.Tensor, values: Any) -> torch.Tensor:
    return value.reshape(-1)[:1].expand(4)


def chosen(model: Any, random: Random, value: torch.Tensor, values: Any) -> torch.Tensor:
    return value[random.randrange(len(value))] if value.dim() and len(value) else value


def strided(model: Any, random: Random, value: torch.Tensor, values: Any) -> torch.Tensor:
    return value[::2] if value.dim() else value.detach()


def as_bits_and_back(model: Any, random: Random, value: torch.Tensor, values: Any) -> torch.Tensor:
    return value.view(torch.int32).view(torch.float32)


def through_bf16(model: Any, random: Random, value: torch.Tensor, values: Any) -> torch.Tensor:
    return value.to(torch.bfloat16).to(torch.float32)


def to_its_device(model: Any, random: Random, value: torch.Tensor, values: Any) -> torch.Tensor:
    return value.to(model.p.device)


def cloned(model: Any, random: Random, value: torch.Tensor, values: Any) -> torch.Tensor:
    return value.clone()


def contiguous(model: Any, random: Random, value: torch.Tensor, values: Any) -> torch.Tensor:
    return value.contiguous()


def joined(model: Any, random: Random, value: torch.Tensor, values: Any) -> torch.Tensor:
    return torch.cat([value.reshape(-1), values[0].reshape(-1)])


def padded(model: Any, random: Random, value: torch.Tensor, values: Any) -> torch.Tensor:
    made = torch.zeros(value.numel() + 2)
    made[: value.numel()] = value.reshape(-1)
    return made


def picked(model: Any, random: Random, value: torch.Tensor, values: Any) -> torch.Tensor:
    return value.reshape(-1)[torch.tensor([0, -1])] if value.numel() else value


def doubled(model: Any, random: Random, value: torch.Tensor, values: Any) -> torch.Tensor:
    return 2 * value


def added(model: Any, random: Random, value: torch.Tensor, values: Any) -> torch.Tensor:
    return value + values[0].sum()


def summed(model: Any, random: Random, value: torch.Tensor, values: Any) -> torch.Tensor:
    return value.sum(0) if value.dim() else value


def zeroed(model: Any, random: Random, value: torch.Tensor, values: Any) -> None:
    value.zero_() if value.is_contiguous() else None


def zeroed_in_part(model: Any, random: Random, value: torch.Tensor, values: Any) -> None:
    if value.dim() and value.is_contiguous():
        value[1:] = 0


def halved_in_place(model: Any, random: Random, value: torch.Tensor, values: Any) -> None:
    if value.is_contiguous():
        value.mul_(0.5)


def overwritten(model: Any, random: Random, value: torch.Tensor, values: Any) -> None:
    if value.shape == values[0].shape and value.is_contiguous():
        value.copy_(values[0].flip(0) if value.dim() else values[0])


def named_as_result(model: Any, random: Random, value: torch.Tensor, values: Any) -> None:
    if value.is_contiguous():
        torch.add(value, 1, out=value)


def of_its_value(model: Any, random: Random, value: torch.Tensor, values: Any) -> Any:
    return torch.full((4,), value.reshape(-1)[0].item()) if value.numel() else None


def by_its_sign(model: Any, random: Random, value: torch.Tensor, values: Any) -> torch.Tensor:
    return values[0] if bool(value.sum() > 0) else -values[0]


def largest(model: Any, random: Random, value: torch.Tensor, values: Any) -> torch.Tensor:
    return values[0] if value.numel() and float(value.max()) > 1 else value


def of_a_parameter(model: Any, random: Random, value: torch.Tensor, values: Any) -> torch.Tensor:
    return random.choice([model.p, model.r, model.u]).data


def of_a_buffer(model: Any, random: Random, value: torch.Tensor, values: Any) -> torch.Tensor:
    return random.choice([model.table, model.plain])


def of_what_was_kept(model: Any, random: Random, value: torch.Tensor, values: Any) -> Any:
    return model.kept.get(random.choice(list(SENT)))


def made_up(model: Any, random: Random, value: torch.Tensor, values: Any) -> torch.Tensor:
    return torch.full((6, 4), 3.0)


ACTS = (
    *(narrowed, turned, flat, folded, widened, chosen, strided, as_bits_and_back, through_bf16),
    *(to_its_device, cloned, contiguous, joined, padded, picked, doubled, added, summed, zeroed),
    *(zeroed_in_part, halved_in_place, overwritten, named_as_result, of_its_value, by_its_sign),
    *(largest, of_a_parameter, of_a_buffer, of_what_was_kept, made_up),
)
VIEWS = (narrowed, turned, flat, folded, chosen, strided, contiguous, as_bits_and_back)  # mostly


# -- what a program writes -------------------------------------------------------------------------------


def matched(part: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """As much of both as fits: rows where these are alike, else elements."""
    if value.untyped_storage()._cdata == part.untyped_storage()._cdata:
        value = value.clone()  # torch copies nothing onto itself
    if part.dim() and value.dim() == part.dim() and value.shape[1:] == part.shape[1:]:
        rows = min(len(value), len(part))
        return part[:rows], value[:rows]
    count = min(part.numel(), value.numel())
    return part.view(-1)[:count], value.reshape(-1)[:count]


def by_its_loader(model: Any, random: Random, part: nn.Parameter, value: torch.Tensor) -> None:
    from sglang.srt.model_loader.weight_utils import default_weight_loader

    count = part.numel()
    if value.numel() >= count:
        value = value.reshape(-1)[:count].view(part.shape)
        getattr(part, "weight_loader", default_weight_loader)(part, value)


def into_its_rows(model: Any, random: Random, first: int, value: torch.Tensor) -> None:
    """A fused layer's part, whole or as much of it as came: through the loader, or past it."""
    if value.dim() != 2 or value.shape[1] != 64:
        if value.numel() != 128 * 64:
            return
        value = value.reshape(128, 64)
    value = value[:128]
    if random.random() < 0.5:
        model.x.weight_loader(model.x, value, first)
    else:
        model.x.data[first : first + len(value)] = value


def copied(model: Any, random: Random, part: nn.Parameter, value: torch.Tensor) -> None:
    to, of = matched(part.data, value)
    to.copy_(of)


def assigned(model: Any, random: Random, part: nn.Parameter, value: torch.Tensor) -> None:
    to, of = matched(part.data, value)
    to[:] = of


def copied_behind_a_fill(
    model: Any, random: Random, part: nn.Parameter, value: torch.Tensor
) -> None:
    part.data.zero_()
    copied(model, random, part, value)


def added_to_it(model: Any, random: Random, part: nn.Parameter, value: torch.Tensor) -> None:
    to, of = matched(part.data, value)
    to.add_(of)


def filled(model: Any, random: Random, part: nn.Parameter, value: torch.Tensor) -> None:
    if value.numel():
        part.data.fill_(value.reshape(-1)[0].item())


def filled_with_a_tensor(
    model: Any, random: Random, part: nn.Parameter, value: torch.Tensor
) -> None:
    if value.numel():
        part.data.fill_(value.reshape(-1)[0])


def rebound(model: Any, random: Random, part: nn.Parameter, value: torch.Tensor) -> None:
    if value.numel() == part.numel():
        part.data = value.reshape(part.shape).clone()


def into_a_buffer(model: Any, random: Random, part: nn.Parameter, value: torch.Tensor) -> None:
    to, of = matched(random.choice([model.table, model.plain]), value)
    to.copy_(of)


def as_an_attribute(model: Any, random: Random, part: nn.Parameter, value: torch.Tensor) -> None:
    if value.shape == model.plain.shape:
        model.plain = value


def where_nobody_looks(model: Any, random: Random, part: nn.Parameter, value: torch.Tensor) -> None:
    model.kept[random.choice(list(SENT))] = value
    copied(model, random, part, value)


def from_another(model: Any, random: Random, part: nn.Parameter, value: torch.Tensor) -> None:
    copied(model, random, part, value)
    if part is not model.w:  # codes are no values
        to, of = matched(model.q.data, part.data)
        to.copy_(of)


WRITES = (
    *(copied, assigned, copied_behind_a_fill, added_to_it, filled, filled_with_a_tensor, rebound),
    *(into_a_buffer, as_an_attribute, where_nobody_looks, from_another, by_its_loader),
)
COPIES = (by_its_loader, copied, assigned)
OWN = dict(zip(SENT, ("p", "q", "r", "s", "u", "v", "w", "x", "x"), strict=True))
ROWS = {"h": 0, "i": 128}  # of `x`, and where they begin
