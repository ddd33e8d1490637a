"""What happens in one call of a `weight_loader`: its writes, checked, quantized and stored."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from ...config import Options
from ...errors import Fp8RlError, RefitError
from ...numerics.write_table import Piece
from ..arrival.sent_tensors import UNKNOWN, Made, Source
from ..interception import Write, unwatched
from ..ledger.ledger import Ledger
from ..model.parameters import Target, part_of
from .call import Call
from .checks import (
    check_dtype,
    check_integers,
    check_landing,
    check_shape,
    check_takes_scale,
    has_fewer_bits,
    landings_elsewhere,
)
from .deferred import Deferred
from .learned import LearnedLoader, LearnedLoaders
from .matrix_writes import matrix_writes, store_piece
from .pairs import Half, PairTable, blocks_of, store_pair

_FP8 = torch.float8_e4m3fn
_MADE = "its loader makes a tensor of its own"
_NOT_SENT = "SGLang writes what was not sent"
# Behind these models call a loader with other arguments (GLM-Image, EmbeddingGemma 2), or copy past it.
_BEHIND_OTHERS = (AssertionError, TypeError)


@dataclass
class _Given:
    """What a target is given, by its loader or without one.

    Attributes:
        name: what errors call it, and `made`: of what it was made.
        part: of the target that it is for, see `part_of`.
        address: of what came, or where it goes: the same where a model tries again.
        key, learned: what its loader is known by, and does, if it is known.
    """

    call: Call
    target: Target
    name: str
    made: Made
    part: tuple = ()
    address: int = 0
    key: tuple | None = None
    learned: LearnedLoader | None = None

    @contextmanager
    def noted(self) -> Iterator[None]:
        """What is raised in here fails the call, even if the model catches it, unless it tries again and succeeds."""
        raised, key = self.call.raised, (self.name, self.target.index, self.address)
        try:
            with self.call.lane():
                yield
        except Fp8RlError as error:
            part = () if isinstance(error, _BEHIND_OTHERS) else self.part
            raised[(*key, part)] = error.subject, str(error)
            raise
        if raised:
            raised.pop((*key, ()), None)
            raised.pop((*key, self.part), None)


def _refit_error_and(kind: type[Exception]) -> type[RefitError]:
    """Models know what to do by it (`_BEHIND_OTHERS`)."""
    if issubclass(RefitError, kind):
        return RefitError
    return type("RefitError", (RefitError, kind), {"__reduce__": _as_refit_error})


def _as_refit_error(error: RefitError) -> tuple[Any, tuple[str, ...]]:
    return RefitError, (error.subject, error.value, error.rule, error.remedy)


class LoaderCalls:
    """Stores what one loader call was given. Loaders may call it from several threads.

    Every region that is written is noted in the ledger.
    """

    def __init__(self, options: Options, pairs: PairTable, ledger: Ledger) -> None:
        self.options, self.pairs, self.ledger = options, pairs, ledger
        self._learned = LearnedLoaders()

    def load(
        self,
        call: Call | None,
        target: Target,
        native: Any,
        loaded: torch.Tensor,
        args: tuple,
        kwargs: dict,
    ) -> None:
        """One loader call: `native(parameter, loaded, *args, **kwargs)`, quantized on write.

        Raises:
            Fp8RlError: the tensor does not fit, or belongs to no update; nothing of it was stored.
        """
        if call is None:
            raise RefitError(
                target.name,
                "a weight_loader called outside model.load_weights",
                "every write has to belong to an update, or its scale could be left behind",
                "Send the tensor through model.load_weights or an update_weights_from_* call.",
            )
        if call.observer is not None:
            call.observer.note_more()
        made = call.sources.made_of(loaded)
        name = made.name or call.sources.latest_name or target.name
        key = self._learned.key_of(target, native, loaded, args, kwargs)
        learned, part = self._learned.known(key), part_of(args, kwargs)
        given = _Given(call, target, name, made, part, loaded.data_ptr(), key, learned)
        with given.noted():
            try:
                if not self._defer(given, loaded):
                    self._load(given, native, loaded, args, kwargs)
            except Fp8RlError:
                raise
            except Exception as error:
                raise _refit_error_and(type(error))(
                    name,
                    f"{loaded.dtype} of shape {tuple(loaded.shape)} for {target.name} "
                    f"{tuple(target.parameter.shape)}",
                    f"SGLang's weight_loader refused it: {error or type(error).__name__}",
                    "Send the tensor as the checkpoint has it.",
                ) from error

    def _defer(self, given: _Given, loaded: torch.Tensor) -> bool:
        """Leave to the call's table what a loader would do; False where it can't be left.

        Raises:
            RefitError: it can't be done at all.
        """
        call, target, learned = given.call, given.target, given.learned
        deferred, is_pair = call.deferred, target.is_fp8 and loaded.dtype == _FP8
        if deferred is None or learned is None or is_pair or not given.made.is_view:
            return False  # the codes of another rank's expert wait for their scale too
        (source,) = given.made.sources
        is_part = not source.is_scale and source.offset_of(loaded) is not None
        if not is_part or landings_elsewhere(source, target, self.ledger.names.known):
            return False
        call.sources.consume(given.made.sources)
        rows = learned.rows(target, deferred.layout_of(target), given.name, loaded)
        if rows is None:
            return False
        one = Deferred(target, rows, source, given.address, loaded.untyped_storage())
        if not deferred.add(one):
            return False
        if has_fewer_bits(source, target):
            call.narrowed[source.name] = None
        return True

    def store(self, call: Call, target: Target, write: Write) -> None:
        """One write that SGLang makes into a target without its loader.

        Raises:
            RefitError: FP8 codes, or a scale: without a loader it is not known which belong together.
        """
        source = write.source
        made = UNKNOWN if source is None else call.sources.made_of(source)
        name = made.name or target.name
        address = write.offset if source is None else source.data_ptr()
        given = _Given(call, target, name, made, address=address)
        with given.noted():
            if source is not None and (made.is_scale or source.dtype == _FP8):
                raise RefitError(
                    name,
                    f"{source.dtype} for {target.name}",
                    "SGLang writes it without a weight_loader, so its codes and scales can't be paired",
                    "Send this tensor in BF16 or FP32.",
                )
            if source is not None and made.is_view:  # what a model makes it converts itself
                check_dtype(target, name, source)
            self._note(given, [write], [made])
            if call.update.origin.stores:
                self._do(given, [write], [made])
            # What SGLang makes of the target afterwards is made of the same.
            call.sources.derive(target.parameter, made.sources, adds=True)

    def _load(
        self, given: _Given, native: Any, loaded: torch.Tensor, args: tuple, kwargs: dict
    ) -> None:
        call, target, name, made = given.call, given.target, given.name, given.made
        source = made.sources[0] if made.sources else None
        call.sources.consume(made.sources)
        is_pair = target.is_fp8 and loaded.dtype == _FP8
        if is_pair or made.is_scale:
            with unwatched():  # a model may cut it out of a larger tensor, or turn it
                loaded = loaded.contiguous()
        if made.is_scale:
            check_takes_scale(target, name)
            half = Half(name, loaded, source, self.ledger.stamp, is_scale=True)
            self._store_half(given, half)
            return
        learned = given.learned
        if learned is not None:
            writes = learned.writes(loaded)
        else:
            if not is_pair:
                check_dtype(target, name, loaded)
            check_shape(target, native, name, loaded, args, kwargs)

            def run(parameter: torch.Tensor) -> None:
                native(parameter, loaded, *args, **kwargs)

            writes = self._writes(given, loaded, run)
        # A write may be of something else, which a loader kept; what is learnt is not.
        is_of_it = is_pair or learned is not None
        of_each = [
            made if is_of_it or one.source is None else call.sources.made_of(one.source)
            for one in writes
        ]
        self._note(given, writes, of_each)
        if not call.update.origin.stores:
            return
        if is_pair:
            blocks = blocks_of(name, loaded, writes)
            half = Half(name, loaded, source, self.ledger.stamp, is_scale=False, blocks=blocks)
            self._store_half(given, half)
        else:
            self._do(given, writes, of_each)

    def _note(self, given: _Given, writes: Sequence[Write], of_each: Sequence[Made]) -> None:
        """These writes are to be done, or were learnt; `of_each`: of what each of them is."""
        call = given.call
        groups: dict[tuple[Source, ...], list[Write]] = {given.made.sources: []}
        for one, write in zip(of_each, writes, strict=True):
            groups.setdefault(one.sources, []).append(write)
            if not one.is_view:
                call.sources.leave_native(one.sources, _MADE if one.sources else _NOT_SENT)
        for sources, theirs in groups.items():
            if call.update.origin.is_serving:
                check_landing(sources, given.target, self.ledger.names.known)
            call.sources.consume(sources)
            call.narrowed |= {
                one.name: None for one in sources if has_fewer_bits(one, given.target)
            }
            if not call.update.origin.is_serving:
                self.ledger.names.landed(sources, given.target, given.part, theirs)

    def _do(self, given: _Given, writes: Sequence[Write], of_each: Sequence[Made]) -> None:
        recording = given.call.recording
        if (deferred := given.call.deferred) is not None:
            if all(one.is_view for one in of_each):
                sources = [one.source for one in writes if one.source is not None]
                deferred.close_for(given.target, sources)
            else:  # it may be of the model's memory
                deferred.close()
        with unwatched():
            for write in writes:
                check_integers(given.target, given.name, write)
            for one, write in zip(of_each, writes, strict=True):
                done = self._store(given, write)
                box = self.ledger.write(given.target, write.region)
                if recording is None or not one.is_view:
                    continue
                if box is None:
                    given.call.sources.leave_native((), "it writes what is no box")
                    continue
                if write.source is None and not given.target.is_fp8:
                    # The padding of a vocabulary: no checkpoint has it, and it is no older than the rest.
                    recording.add_fill(given.target, write, box)
                    continue
                recording.add(given.target, [(one.sources[0], matrix) for matrix in done], [box])

    def _writes(
        self,
        given: _Given,
        loaded: torch.Tensor,
        run: Callable[[torch.Tensor], None],
    ) -> list[Write]:
        """What the loader writes, which `run` gives a parameter; it is learnt if it can be.

        Returns:
            nothing where it does more than copy: that it did on the parameter itself.

        Raises:
            RefitError: it does, and that is quantized.
        """
        target, key, observer = given.target, given.key, given.call.observer
        assert observer is not None
        found = observer.writes_of(run, target, loaded.dtype)
        # Of the start only what does not change behind it: the host makes what it likes of other parameters.
        if key is not None and (given.call.update.origin.is_serving or target.is_fp8):
            self._learned.note(key, loaded, found)
        if not found.other:
            return found.writes
        if target.is_fp8:
            raise RefitError(
                target.name,
                f"a weight_loader that does {found.other}",
                "what is served in FP8 is written by copies, which are cast with their scales",
                "Add the module to ignored_layers.",
            )
        self._run_on_parameter(given, run)
        self.ledger.write(target, None)
        return []

    def _run_on_parameter(self, given: _Given, run: Callable[[torch.Tensor], None]) -> None:
        """Run a loader that does more than copy. Of one that raises, or makes a NaN or Inf, nothing stays."""
        if given.call.deferred is not None:
            given.call.deferred.close()
        call, parameter, known = given.call, given.target.parameter, len(given.call.not_finite)
        assert call.observer is not None
        with unwatched():
            before = parameter.data.clone()
        try:
            with call.observer.watching_thread():
                run(parameter)
        except Exception:
            with unwatched():
                parameter.data.copy_(before)
            raise
        with unwatched():
            found = [bad.any() for name, bad in call.not_finite[known:] if name == given.name]
            if parameter.is_floating_point():
                was_finite = torch.isfinite(before).all()
                found.append(was_finite & ~torch.isfinite(parameter.data).all())
                call.not_finite.append((given.name, found[-1].reshape(1)))
            for bad in found:
                parameter.data.copy_(torch.where(bad, before, parameter.data))

    def _store_half(self, given: _Given, half: Half) -> None:
        """Half of an FP8 weight came; with the other one it is stored."""
        target, recording = given.target, given.call.recording
        if given.call.deferred is not None:
            given.call.deferred.close_for(target)
        with unwatched():
            if given.call.bucket is None:  # a stream, whose next tensor may get this one's memory
                half.keep()
            pair = self.pairs.add(target, given.part, half)
            if pair is None:
                return
            weight, scale = pair
            copies = store_pair(target, weight, scale, self.options)
        boxes = [self.ledger.write(target, write.region) for _, write in weight.blocks]
        if recording is not None:
            if target.takes_packed_scales and scale.source is not None:
                recording.add_exponents(scale.source)
            done = [(half.source, one) for half, one in copies]
            recording.add(target, done, [box for box in boxes if box is not None])

    def _store(self, given: _Given, write: Write) -> list[Piece]:
        """Do one write; a block or row that is not finite is noted, not stored. Returns what was done."""
        target, name = given.target, given.name
        done = matrix_writes(target, name, write)
        for one in done:
            bad = store_piece(one, name, self.options)
            if bad is not None:
                given.call.not_finite.append((name, bad))
        return done
