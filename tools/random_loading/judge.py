"""What an update leaves of models that nobody thought of (`programs.py`).

Judges, which know nothing of this package: the same model without it; and what several of these agree about that
held and had loaded other things before, for that is what an update determines, whatever went before: refused and
failed updates, half ones, memory that was lost.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from random import Random
from typing import Any
from unittest.mock import patch

import torch

from sglang_fp8rl.config import Options
from sglang_fp8rl.engine.arrival.bucket import FlatBucket
from sglang_fp8rl.engine.arrival.update import Origin, Update
from sglang_fp8rl.engine.law.law import law_of
from sglang_fp8rl.engine.law.record import State
from sglang_fp8rl.engine.native import deferred, learned
from sglang_fp8rl.engine.proof.extension import Fingerprints, fingerprint_of_ranks
from sglang_fp8rl.engine.refit import ModelRefit
from sglang_fp8rl.errors import QuantizationError, RefitError
from sglang_fp8rl.numerics import FP8_DTYPE, quantize_blockwise, quantize_per_channel
from sglang_fp8rl.wire.bucket import Bucket
from sglang_fp8rl.wire.refit_note import RefitNote
from tools.random_loading.programs import SENT, Program

Tensors = dict[str, torch.Tensor]
EVENTS = ("nothing", "nothing", "fails", "is partial", "is lost", "another layout")


def weights(random: Random) -> Tensors:
    generator = torch.Generator().manual_seed(random.randrange(1 << 30))
    return {name: torch.randn(shape, generator=generator) for name, shape in SENT.items()}


def held(model: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """All that a model holds, as bytes; matrices that the served one has in FP8 are quantized here."""
    for name, one in (*model.named_parameters(), *model.named_buffers()):
        if one.dtype == torch.float32 and name == "linear.weight":
            codes, scale = quantize_per_channel(one)
            yield from ((name, codes.view(torch.uint8)), ("linear.weight_scale", scale))
        elif one.dtype == torch.float32 and name == "blocks.weight":
            codes, scale = quantize_blockwise(one)
            yield from ((name, codes.view(torch.uint8)), ("blocks.weight_scale_inv", scale))
        else:
            yield name, one.view(torch.uint8) if one.dtype == FP8_DTYPE else one
    yield "plain", model.plain
    for name, one in model.kept.items():
        yield f"kept.{name}", one


def kept_apart(model: Any) -> Tensors:
    """As `held`, without what a program only remembers; a tensor that it gave up is not there."""
    return {name: one for name, one in held(model) if not name.startswith("kept.")}


def flat(sent: Sequence[tuple[str, torch.Tensor]]) -> FlatBucket:
    bucket = Bucket.of(sent)
    return FlatBucket(bucket.flat, bucket.metadata)


def buckets_of(order: int, tensors: Tensors) -> Iterator[Tensors]:
    """All of them in one bucket, or in two."""
    cut = Random(order).choice([len(tensors), len(tensors), 3])
    for some in (list(tensors.items())[:cut], list(tensors.items())[cut:]):
        if some:
            yield dict(some)


def loaded(
    seed: int, left_out: frozenset[str], order: int, *loads: Tensors, before: float = 0.0
) -> Any:
    """The model alone behind these loads; before each of them it held `before` everywhere."""
    alone = Program(seed, left_out)
    with torch.no_grad():
        for tensors in loads:
            for one in (*alone.parameters(), *alone.buffers(), alone.plain):
                one.fill_(before)
            for bucket in buckets_of(order, tensors):
                alone.load_weights([(name, one.clone()) for name, one in bucket.items()])
    return alone


def determined(
    seed: int, left_out: frozenset[str], order: int, tensors: Tensors
) -> tuple[Tensors, Tensors]:
    """What a load leaves whatever was there before: the bytes, and for which elements that holds.

    Before may be anything in memory, and other loads: a program may remember a tensor, or count them.

    Raises:
        QuantizationError: the model computes what is not finite.
        KeyError: it has no such name.
    """
    earlier = weights(Random(order))
    models = (
        loaded(seed, left_out, order, tensors),
        loaded(seed, left_out, order, tensors, before=777.0),
        loaded(seed, left_out, order, earlier, tensors),
        loaded(seed, left_out, order, earlier, earlier, tensors, before=777.0),
    )
    one, *others = map(kept_apart, models)
    masks = {
        name: torch.stack([tensor == other[name] for other in others]).all(0)
        for name, tensor in one.items()
    }
    for layer, leaf, rows in (("linear", "weight_scale", 1), ("blocks", "weight_scale_inv", 128)):
        # Codes say nothing without their scale.
        same = masks[f"{layer}.{leaf}"].repeat_interleave(rows, 0)[: len(masks[f"{layer}.weight"])]
        masks[f"{layer}.weight"] = masks[f"{layer}.weight"] & same[:, :1]
    return one, masks


@dataclass
class Run:
    """One program, served and alone, through its updates.

    Attributes:
        left_out: to find the part of a program that matters: names and steps, as a failure lists them.
        is_tainted: something failed or was lost: only what an update determines is known from then on.
        is_over: no judge can follow it any more.
        outcomes: of its updates.
    """

    seed: int
    left_out: frozenset[str] = frozenset()
    is_tainted: bool = False
    is_over: bool = False
    outcomes: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.random = Random(self.seed)
        self.served = Program(self.seed, self.left_out, is_fp8=True)
        self.alone = Program(self.seed, self.left_out)
        options = Options(replay=self.seed % 5 != 4)
        self.refit = ModelRefit(self.served, options, {}, list)
        self.refit.attach()
        self.is_flat, self.order = self.random.random() < 0.5, self.random.getrandbits(30)
        self.is_named = self.random.random() < 0.7
        self.at = 0

    def start(self) -> bool:
        """The load at startup; whether it came to its end."""
        tensors = weights(self.random)
        try:
            for bucket in buckets_of(self.order, tensors):
                self.served.load_weights(iter([(n, one.clone()) for n, one in bucket.items()]))
        except RefitError:
            return False
        self.first = self._written_at_start(tensors)
        return self._alone_follows(tensors)

    def update(self) -> None:
        """Something, and then a full update."""
        self.at += 1
        event = self.random.choice(EVENTS)
        if event == "another layout":
            self.is_flat, order = self.random.random() < 0.5, self.random.getrandbits(30)
            if self._loads_alike(order):
                self.order = order
        elif event == "is lost":
            self._lose()
        elif event != "nothing":
            self._go_wrong(event)
            if self.is_over:
                return
        tensors = weights(self.random)
        error = self._send(tensors)
        if error:
            self.outcomes["refused"] += 1
            assert self.state is not State.WHOLE, self._text(f"refused and whole: {error}")
            self.is_tainted = True
            again = self._send(tensors)
            if again:
                self.outcomes["refused again"] += 1
                return
            self.outcomes["accepted the second time"] += 1
        elif not self.is_tainted and not self._alone_follows(tensors):
            return
        self._compare(tensors)
        self.outcomes["whole" if self.state is State.WHOLE else "not whole"] += 1

    # -- what may happen in between --------------------------------------------------------------------

    def _lose(self) -> None:
        """The memory of the weights is given back, and comes again with anything in it."""
        with torch.no_grad():
            for one in (*self.served.parameters(), *self.served.buffers(), self.served.plain):
                one.view(-1).view(torch.uint8).fill_(0x45)
        law_of(self.refit).weights_lost()
        assert self.state is not State.WHOLE
        self.is_tainted = True

    def _go_wrong(self, event: str) -> None:
        """An update that can't be right: half of it, a NaN, a name that nobody has."""
        tensors, name = weights(self.random), self.random.choice(list(SENT))
        if event == "is partial":
            del tensors[name]
        elif self.random.random() < 0.5:
            tensors[name].view(-1)[-1] = float("nan")
        else:
            tensors["z"] = tensors[name].clone()
        error = self._send(tensors)
        self.is_tainted = True
        if error:
            assert self.state is not State.WHOLE, self._text(f"refused and whole: {error}")
            again = self._send(tensors)
            assert again or event == "is partial", self._text(f"refused, then accepted: {error}")
            self.outcomes["refused again"] += bool(again)
        elif "z" in tensors:
            with suppress(KeyError):
                loaded(self.seed, self.left_out, self.order, tensors)
                self.is_over = True  # it takes any name, and may remember it
                return
            raise AssertionError(self._text("a name that the model has not was accepted"))
        elif event == "is partial":
            with suppress(QuantizationError):
                old = self._old(determined(self.seed, self.left_out, self.order, tensors)[1])
                is_whole = self.state is State.WHOLE
                assert not (old and is_whole), self._text(f"whole without {name}: {old}")
        else:
            self._compare(tensors)

    # -- parts of an update ----------------------------------------------------------------------------

    def _send(self, tensors: Tensors) -> str:
        """One refit, in buckets; what was wrong with it."""
        note = (
            RefitNote(f"{self.at}.{self.random.random()}", None, "all") if self.is_named else None
        )
        buckets = list(buckets_of(self.order, tensors))
        for number, bucket in enumerate(buckets, 1):
            sent = [(name, one.clone()) for name, one in bucket.items()]
            is_last = number == len(buckets)
            update = Update(Origin.TENSOR, note=note, is_last_call=is_last)
            try:
                with self.refit.during(update):
                    self.served.load_weights(flat(sent) if self.is_flat else sent)
            except RefitError as error:
                return str(error)
            law = law_of(self.refit)
            if law.log.current is not None:
                law.log.end_request(law.verdict(update), update)
            self.refit.derived.end_of_update()
        return ""

    def _alone_follows(self, tensors: Tensors) -> bool:
        """The model alone loads the same, and then both hold the same; False where it computes what is not finite."""
        self.alone.log = []
        with torch.no_grad():
            for bucket in buckets_of(self.order, tensors):
                self.alone.load_weights([(name, one.clone()) for name, one in bucket.items()])
        try:
            expected = dict(held(self.alone))
        except QuantizationError:
            self.is_tainted = True
            return False
        for name, one in held(self.served):
            assert torch.equal(one, expected[name]), self._text(f"{name} differs")
        return True

    def _written_at_start(self, tensors: Tensors) -> Tensors:
        """Which elements what was sent determines; a constant may as well be old."""
        others = {name: one.flip(0) + 1 if one.dim() else one + 1 for name, one in tensors.items()}
        try:
            expected, masks = determined(self.seed, self.left_out, self.order, tensors)
            other, _ = determined(self.seed, self.left_out, self.order, others)
        except QuantizationError:
            return {}
        return {name: mask & (expected[name] != other[name]) for name, mask in masks.items()}

    def _loads_alike(self, order: int) -> bool:
        """Whether the model alone loads the same in other buckets: some remember one name until another comes."""
        tensors = weights(Random(0))
        try:
            one, other = (
                kept_apart(loaded(self.seed, self.left_out, at, tensors))
                for at in (self.order, order)
            )
        except QuantizationError:
            return False
        return all(torch.equal(one[name], other[name]) for name in one)

    def _old(self, masks: Tensors) -> list[str]:
        """Parameters of which an update leaves something old that the load at startup wrote."""
        updated = dict(self.served.named_parameters()) | dict(self.served.named_buffers())
        return [
            name
            for name, mask in self.first.items()
            if name in updated and bool((mask & ~masks[name]).any())
        ]

    def _compare(self, tensors: Tensors) -> None:
        """What an accepted update determines is there; whole means that nothing of it is old."""
        try:
            expected, masks = determined(self.seed, self.left_out, self.order, tensors)
        except QuantizationError:
            return
        for name, one in kept_apart(self.served).items():
            same = (one == expected[name]) | ~masks[name]
            assert bool(same.all()), self._text(f"{name} is not what was sent")
        if self.state is not State.WHOLE:
            return
        assert not self._old(masks), self._text(f"whole, and old: {self._old(masks)}")
        fresh = Program(self.seed, self.left_out, is_fp8=True)
        refit = ModelRefit(fresh, Options(), {}, list)
        refit.attach()
        for bucket in buckets_of(self.order, tensors):
            fresh.load_weights(iter([(n, one.clone()) for n, one in bucket.items()]))
        ours, theirs = (
            fingerprint_of_ranks([Fingerprints(one).rank()]) for one in (self.refit, refit)
        )
        for name, number in theirs.numbers.items():
            if self._is_determined(refit, name, masks) and name not in ours.unproven:
                assert ours.numbers[name] == number, self._text(f"fingerprint of {name}")

    def _is_determined(self, refit: ModelRefit, name: str, masks: Tensors) -> bool:
        targets = {landing.target.name for landing in refit.names.known[name].landings}
        return all(bool(masks[target].all()) for target in targets)

    @property
    def state(self) -> State:
        return law_of(self.refit).log.state

    def _text(self, what: str) -> str:
        return f"seed {self.seed}, update {self.at}: {what}\n" + "\n".join(self.served.log)


@contextmanager
def loaders_count_as_sglangs() -> Iterator[None]:
    """In here the loaders of programs are learnt as those of SGLang's layers are, and their writes wait."""
    layers = ("tools.random_loading.programs", "sglang.srt.model_loader.weight_utils")
    with patch.object(learned, "_LAYERS", layers), patch.object(deferred, "FEWEST", 1):
        yield


def run(seed: int, left_out: frozenset[str] = frozenset(), updates: int = 5) -> Run:
    """A program and its updates; of every third one the loaders are learnt."""
    with loaders_count_as_sglangs() if seed % 3 == 2 else nullcontext():
        return _run(seed, left_out, updates)


def _run(seed: int, left_out: frozenset[str], updates: int) -> Run:
    one = Run(seed, left_out)
    if one.start():
        for _ in range(updates):
            one.update()
            one.served.log.clear()
            if one.is_over:
                break
    return one
