"""One model class: two refits of a small model, the second replayed, against a fresh one; byte for byte, and by
the outputs of both where the CPU can run it."""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch

from sglang_fp8rl.engine.arrival.update import Origin, Update
from sglang_fp8rl.engine.host.hooks import start_model
from sglang_fp8rl.errors import Fp8RlError

from . import forward
from .compare import differences, differences_of_plain, is_same
from .drafts import IS_DRAFT, judge_draft
from .host import Builder
from .names import Shapes
from .naming import loaded, loaded_by, weights
from .outcome import Row, line_of
from .preload import Judged
from .reliance import Reliance

LAST = 2  # the weight set that the updates end in


class Judge:
    """Follows SGLang's start of one class, and then judges it.

    Args:
        answer: gets the row, when it is done.
        names: of its checkpoint, where they are known; found otherwise, which takes a model on one rank.
    """

    def __init__(
        self,
        architecture: str,
        answer: Callable[[Row], None] = lambda _: None,
        names: Shapes | None = None,
    ) -> None:
        self.row, self._answer, self._names = Row(architecture, "not built"), answer, names
        self._builder: Any = None
        self._plain: Any = None
        self._loaded: Any = None
        self._runner: Any = None
        self._fresh: Any = None
        self._is_broken = False

    # -- as SGLang starts ----------------------------------------------------------------------

    def load(self, model_config: Any, load_config: Any) -> Any:
        """A loaded model; what SGLang makes of it is told next.

        Raises:
            Judged: there is none.
        """
        if not self.loads(Builder(model_config, load_config)):
            self._answer(self.row)
            raise Judged
        return self._loaded.model

    def started(self, runner: Any) -> None:
        self._runner = runner
        self.refits()
        self._answer(self.row)

    def failed(self, error: Exception) -> None:
        if isinstance(error, Fp8RlError):
            self.row.kind, self.row.reasons = "refused", [line_of(error)]
        elif self._loaded is None:
            self.row.reasons = [line_of(error)]
        else:
            self.row.not_started = line_of(error)
            self.refits()
        self._answer(self.row)

    # -- the outcome ---------------------------------------------------------------------------

    def loads(self, builder: Builder) -> bool:
        """Whether a model of it is built and loaded; the row says why not."""
        torch.use_deterministic_algorithms(
            True, warn_only=True
        )  # memory that nobody writes is alike
        self._builder, row = builder, self.row
        try:
            self._plain, _ = builder.build(is_quantized=False)
        except Exception as error:  # noqa: BLE001  the row says it
            row.reasons = [line_of(error)]
            return False
        if IS_DRAFT.fullmatch(row.architecture):
            self._names = judge_draft(builder, self._plain, row, self._names)
            return False
        try:
            if self._names:
                self._loaded = loaded_by(builder, self._plain, self._names, row)
            else:
                self._loaded = loaded(builder, self._plain, row)
        except Exception as error:  # noqa: BLE001  the row says it
            row.kind, row.reasons = "refused", [line_of(error)]
        return self._loaded is not None

    def refits(self) -> None:
        """Update what was loaded, and compare."""
        row, (model, refit, shapes) = self.row, self._loaded
        row.names, row.schemes = len(shapes), _schemes(model)
        reliance = Reliance(refit)
        if self._runner is None:
            refit.note_loaded()
        before = self._outputs(model)
        try:
            for seed in (1, LAST):
                self._send(list(weights(shapes, seed).items()))
                refit.derived.end_of_update()
        except Fp8RlError as error:
            row.kind, row.reasons = "refused", [line_of(error)]
            return
        counts = next(one for one in refit.extensions if one.section == "replay").counts
        row.kind = "replayed" if counts.calls else "native"
        row.reasons = sorted(counts.native_reasons)
        row.relies_on = reliance.found(row.reasons)
        row.unproven = sorted(refit.derived.kept_copies.unproven)
        self._compare(before)
        self._part()
        self._rename()
        if self._is_broken:
            why = f"{row.not_run}; the same model without this method runs here"
            row.kind, row.reasons = "broken", [why, *row.reasons]
        if row.not_started:
            row.kind, row.reasons = "not started", [row.not_started, *row.reasons]

    def _compare(self, before: list[torch.Tensor]) -> None:
        row, (model, refit, shapes) = self.row, self._loaded
        served = self._outputs(model)
        fresh = self._fresh = self._builder.build()[0]
        self._builder.load(fresh, list(weights(shapes, LAST).items()))
        expected = self._outputs(fresh, is_new=True)
        if not row.not_run and self._runner is not None:
            row.not_run = forward.why_no_proof(before, expected)
            if not all(map(is_same, served, expected)):
                row.silent.append("outputs")
        row.silent += sorted(differences(model, fresh))
        self._builder.load(self._plain, list(weights(shapes, LAST).items()))
        row.silent += [
            f"{one} (of SGLang's own)" for one in sorted(differences_of_plain(refit, self._plain))
        ]
        has_run = self._runner is not None and not row.not_run
        row.is_proven = has_run and not row.silent

    def _part(self) -> None:
        """From other weights, twice: each tensor in a call of its own, in any order; what is fused is parted."""
        row, (model, refit, shapes) = self.row, self._loaded
        for turn in range(2):
            self._send(list(weights(shapes, 1).items()))
            refit.derived.end_of_update()
            items = list(weights(shapes, LAST).items())  # anew: some loaders write into them
            random.Random(turn).shuffle(items)
            items = in_their_order(items, shapes, refit.names.known)
            for item in items:
                try:
                    self._send([item])
                except Exception as error:  # noqa: BLE001  the row says it
                    row.whole_only = f"{item[0]}: {line_of(error)}"
                    return
            refit.derived.end_of_update()
        differing = sorted(differences(model, self._fresh))
        row.silent += [f"{one} (parted)" for one in differing]
        row.is_parted = not differing

    def _rename(self) -> None:
        """Once more under names with or without `language_model.`, where SGLang itself takes those like the others."""
        row, (model, refit, shapes) = self.row, self._loaded
        names = {name: name.replace("language_model.", "") for name in shapes}
        if names.keys() == set(names.values()):
            names = {name: re.sub(r"^model\.", "model.language_model.", name) for name in shapes}
        if names.keys() == set(names.values()) or len(set(names.values())) < len(names):
            return
        row.other_names = self._takes_alike(names)
        if not row.other_names:
            return
        for seed in (1, LAST):
            self._send([(names[one], sent) for one, sent in weights(shapes, seed).items()])
            refit.derived.end_of_update()
        row.silent += [f"{one} (renamed)" for one in sorted(differences(model, self._fresh))]

    def _takes_alike(self, names: dict[str, str]) -> bool:
        """Whether SGLang without this method writes the same for other names."""
        found = []
        for known in (names, {name: name for name in names}):
            sent = [(known[name], one) for name, one in weights(self._loaded.shapes, 1).items()]
            plain, _ = self._builder.build(is_quantized=False)
            try:
                with torch.no_grad():
                    plain.load_weights(iter(sent))
            except Exception:  # noqa: BLE001  it does not take them
                return False
            found.append(plain)
        return not any(differences(*found))

    def _send(self, items: list[tuple[str, torch.Tensor]]) -> None:
        model, refit, _ = self._loaded
        with refit.during(Update(Origin.TENSOR)):
            model.load_weights(items)

    def _outputs(self, model: Any, *, is_new: bool = False) -> list[torch.Tensor]:
        """Of a forward pass; none where it can't run, and the row says why."""
        if self._runner is None:
            return []
        self._runner.model = model
        try:
            if is_new:
                start_model(None, self._runner)
            return forward.outputs(self._runner)
        except Exception as error:  # noqa: BLE001  the row says it
            if not self.row.not_run:  # a fresh model gets as far, so that both hold what it leaves
                self.row.not_run = line_of(error)
                self._is_broken = self._plain_runs()
            return []

    def _plain_runs(self) -> bool:
        """Whether the same model without quantization can do what this one can't."""
        self._builder.load(self._plain, list(weights(self._loaded.shapes, 0).items()))
        self._runner.model = self._plain
        try:
            forward.outputs(self._runner)
        except Exception as error:  # noqa: BLE001  the row says it
            self.row.not_run = line_of(error)
            return False
        return True


def _schemes(model: Any) -> dict[str, int]:
    """How many modules are stored in each way."""
    methods = (getattr(module, "quant_method", None) for module in model.modules())
    schemes = (getattr(method, "fp8rl_scheme", None) for method in methods)
    return dict(sorted(Counter(one.name for one in schemes if one and one.is_fp8).items()))


def in_their_order(items: list[Any], order: Any, known: Any) -> list[Any]:
    """What SGLang writes to one place (tied weights, two names of one) in the order that decides it."""
    at = {name: position for position, name in enumerate(order)}
    places: dict[Any, list[str]] = {}
    for name, one in known.items():
        for landing in one.landings if name in at else ():
            for region in landing.regions:
                places.setdefault((landing.target.index, region), []).append(name)
    sent, names = dict(items), [name for name, _ in items]
    for together in places.values():
        spots = sorted(names.index(name) for name in set(together))
        for spot, name in zip(spots, sorted(set(together), key=at.__getitem__), strict=True):
            names[spot] = name
    return [(name, sent[name]) for name in names]


def judged(architecture: str, builder: Builder) -> Row:
    """The outcome without a start: what can be told from bytes."""
    judge = Judge(architecture)
    if judge.loads(builder):
        judge.refits()
    return judge.row
