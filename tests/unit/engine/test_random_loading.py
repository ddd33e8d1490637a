"""As `test_observed_loading.py`, of models that nobody thought of: their `load_weights` are random programs.

The judge is the same model without this package: after every update both hold the same, or the update was refused.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from random import Random
from typing import Any

import pytest
import torch
from torch import nn

from sglang_fp8rl.config import Options
from sglang_fp8rl.engine.arrival.bucket import FlatBucket
from sglang_fp8rl.engine.arrival.update import Origin, Update
from sglang_fp8rl.engine.modules.method import DecidedMethod
from sglang_fp8rl.engine.refit import ModelRefit
from sglang_fp8rl.errors import QuantizationError, RefitError
from sglang_fp8rl.numerics import FP8_DTYPE, quantize_per_channel
from sglang_fp8rl.scheme import Cause, Granularity, Scheme
from sglang_fp8rl.wire.bucket import flatten

Named = Iterable[tuple[str, torch.Tensor]]

SENT = {"a": (6, 4), "b": (6, 4), "c": (4,), "d": (1,), "e": (2, 3, 4), "f": (), "g": (6, 4)}
HELD = {"p": (6, 4), "q": (12, 4), "r": (4,), "s": (1,), "u": (2, 3, 4), "v": ()}
STEPS = 4  # of a program, for each name


class PerChannelMethod(DecidedMethod):
    """A scale for each row, as of a served layer, without a kernel."""

    fp8rl_scheme = Scheme(Granularity.PER_CHANNEL, Cause.MISALIGNED, "")

    def __init__(self) -> None:
        self.served = None

    def reads_packed_scales(self, layer: Any) -> bool:
        return False


class Program(nn.Module):
    """What it does with a name follows from a seed, and from the values that it reads.

    Args:
        is_fp8: whether the matrix `w` is served in FP8.

    Attributes:
        log: its operations so far.
    """

    def __init__(
        self, seed: int, left_out: frozenset[str] = frozenset(), *, is_fp8: bool = False
    ) -> None:
        super().__init__()
        self.seed, self.left_out, self.log = seed, left_out, []
        for name, shape in HELD.items():
            setattr(self, name, nn.Parameter(torch.zeros(shape), requires_grad=False))
        weight, scale = torch.zeros(6, 4), None
        if is_fp8:
            weight, scale = quantize_per_channel(weight)
        self.linear = nn.Linear(4, 6, bias=False)
        self.linear.weight = nn.Parameter(weight, requires_grad=False)
        if scale is not None:
            self.linear.weight_scale = nn.Parameter(scale, requires_grad=False)
            self.linear.quant_method = PerChannelMethod()  # type: ignore[assignment]
        self.register_buffer("table", torch.zeros(6, 4))
        self.plain = torch.zeros(6, 4)
        self.kept: dict[str, Any] = {}
        self.wildness = Random(seed).choice([0.0, 0.02, 0.05, 0.1, 0.5])

    @property
    def w(self) -> nn.Parameter:
        return self.linear.weight

    def load_weights(self, weights: Named) -> None:
        seen: list[torch.Tensor] = []  # across the names of a call
        late: list[Callable[[], object]] = []
        for name, tensor in weights:
            random, values = Random(f"{self.seed}.{name}"), [tensor]
            for step in range(random.randint(1, STEPS)):
                act = random.choice(ACTS if random.random() < self.wildness else VIEWS)
                value = random.choice(values + seen[-1:])
                if f"{name}{step}" in self.left_out:
                    continue
                self.log.append(f"{name}{step}: {act.__name__}")
                found = act(self, random, value, values)
                if found is not None:
                    values.append(found)
            if random.random() < self.wildness:
                seen.append(values[-1])
            is_wild = random.random() < self.wildness
            write = random.choice(WRITES if is_wild else COPIES)
            if name in self.left_out:
                continue
            self.log.append(f"{name}: {write.__name__}")
            parts = [*HELD, "w"] if is_wild else [OWN[name]]
            last = self._write_of(write, random, getattr(self, random.choice(parts)), values[-1])
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

    def _write_of(
        self, write: Any, random: Random, part: nn.Parameter, value: torch.Tensor
    ) -> Callable[[], object]:
        state = random.getstate()

        def act() -> None:
            again = Random()
            again.setstate(state)
            write(self, again, part, value)

        return act


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
OWN = dict(zip(SENT, ("p", "q", "r", "s", "u", "v", "w"), strict=True))


# -- the law -----------------------------------------------------------------------------------------------


def weights(random: Random) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(random.randrange(1 << 30))
    return {name: torch.randn(shape, generator=generator) for name, shape in SENT.items()}


def held(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    for name, one in (*model.named_parameters(), *model.named_buffers()):
        if name == "linear.weight" and one.dtype == torch.float32:
            codes, scale = quantize_per_channel(one)
            yield from ((name, codes.view(torch.uint8)), ("linear.weight_scale", scale))
        else:
            yield name, one.view(torch.uint8) if one.dtype == FP8_DTYPE else one
    yield "plain", model.plain
    for name, one in model.kept.items():
        yield f"kept.{name}", one


def buckets_of(
    random: Random, tensors: dict[str, torch.Tensor]
) -> Iterator[dict[str, torch.Tensor]]:
    """All of them in one bucket, or in two."""
    cut = random.choice([len(tensors), len(tensors), 3])
    for some in (list(tensors.items())[:cut], list(tensors.items())[cut:]):
        if some:
            yield dict(some)


def run(
    seed: int, left_out: frozenset[str] = frozenset(), updates: int = 4
) -> tuple[str, ModelRefit]:
    """One program in a server and by itself; how far it came, `refused` or `done`.

    Args:
        left_out: to find the part of a program that matters: names and steps, as a failure lists them.
    """
    random = Random(seed)
    served, alone = Program(seed, left_out, is_fp8=True), Program(seed, left_out)
    refit = ModelRefit(served, Options(), {}, list)
    refit.attach()
    is_flat, order = random.random() < 0.5, random.getrandbits(30)
    for at in range(updates + 1):
        tensors = weights(random)
        alone.log = []
        for bucket in buckets_of(Random(order), tensors):
            with torch.no_grad():
                alone.load_weights([(name, one.clone()) for name, one in bucket.items()])
            sent = [(name, one.clone()) for name, one in bucket.items()]
            try:
                if not at:
                    served.load_weights(iter(sent))
                    continue
                with refit.during(Update(Origin.TENSOR)):
                    served.load_weights(FlatBucket(*flatten(sent)) if is_flat else sent)
            except RefitError:
                return "refused", refit
        try:
            expected = dict(held(alone))
        except QuantizationError:  # it computed what is not finite
            return "refused", refit
        for name, one in held(served):
            same = torch.equal(one, expected[name])
            assert same, f"seed {seed}, update {at}: {name}\n" + "\n".join(alone.log)
    return "done", refit


# What a thread raises is told by the update.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("first", range(0, 400, 50))
def test_every_update_leaves_what_the_model_alone_has(first):
    found = [run(seed) for seed in range(first, first + 50)]
    done = [refit for how, refit in found if how == "done"]
    assert len(done) > 15  # else it says nothing
    assert any(refit.recipes.counts.calls for refit in done)
    assert any(refit.recipes.counts.native_reasons for refit in done)
