"""One row of the table, and how rows are written down."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .trainer import Answer, Trainer

Act = Callable[["Trainer"], "Answer"]


class Then(Enum):
    """What the status says of the served weights after a fault."""

    WHOLE = "whole"
    FAILED = "failed"
    MIXED = "mixed"
    OPEN = "open"


@dataclass(frozen=True)
class Fault:
    """One thing that goes wrong.

    Attributes:
        word: the row's name, as a function's.
        act: makes it happen; its last answer is what the client is told.
        told: words that the answer has to contain; none where success is answered.
        code: HTTP status of the answer; an engine answers 400 or 200.
        about: the tensor that the answer has to name.
        then: what the status says.
        serves: names that have other bytes afterwards; None for "any of them".
        host: whose answer it is, where it is not this package's: the wording may change with SGLang.
        needs_server: it is about HTTP, processes or connections, so no engine can run it.
        needs_sessions: there is nothing to do on a SGLang without them.
        then_here: what the status says on the installed SGLang, where it is something else.
    """

    word: str
    act: Act
    told: tuple[str, ...]
    code: int
    about: str
    then: Then
    serves: tuple[str, ...] | None
    host: bool = False
    needs_server: bool = False
    needs_sessions: bool = False
    then_here: Then | None = None

    @property
    def name(self) -> str:
        return self.word.strip("_").replace("_", " ")

    @property
    def id(self) -> str:
        return self.word.strip("_").replace("_", "-")

    def missing_words(self, text: str) -> list[str]:
        """Return what an answer had to say and doesn't."""
        return [word for word in (*self.told, self.about) if word not in text]


class Group:
    """Rows of one kind, in the order they are written."""

    def __init__(self, title: str, **common: bool) -> None:
        self.title, self._common = title, common
        self.faults: list[Fault] = []

    def row(
        self,
        *told: str,
        code: int = 400,
        about: str = "",
        then: Then = Then.FAILED,
        serves: Sequence[str] | None = (),
        word: str = "",
        **flags: object,
    ) -> Callable[[Act], Act]:
        """Make a row of the function below, under its name if none is given; arguments as the attributes of `Fault`."""

        def register(act: Act) -> Act:
            known = {**self._common, **flags}
            names = None if serves is None else tuple(serves)
            name = word or act.__name__
            self.faults.append(Fault(name, act, told, code, about, then, names, **known))  # type: ignore[arg-type]
            return act

        return register
