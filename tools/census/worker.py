"""Imports SGLang once, then forks for every class that it is asked for: one line in, one line out."""

from __future__ import annotations

import functools
import gc
import json
import os
import re
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from sglang_fp8rl.lab.testing.ports import free_port

from .host import start
from .layout import ONE_RANK, Layout
from .outcome import Row
from .overrides import radix_cache
from .preload import import_sglang, prepare_environment
from .ranks import run_forked

if TYPE_CHECKING:
    from .judge import Judge

CPU_ATTENTION = "torch_native"

# Makes who judges a class, of its name and of what gets the row.
MakeJudge = Callable[[str, Callable[[Row], None]], "Judge"]


def main(limit: float, layout: Layout) -> None:
    """Architectures on stdin, `Row`s as JSON on stdout."""
    prepare_environment()
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what SGLang prints is no answer
    import_sglang()
    from .configs import warm_up

    warm_up()
    gc.freeze()  # a collection in a child would copy all of it
    for line in sys.stdin:
        row = row_of(line.strip(), limit, layout=layout)
        print(json.dumps(row.__dict__), file=answers)


def row_of(
    architecture: str, limit: float, save_to: Path | None = None, layout: Layout = ONE_RANK
) -> Row:
    """A row of one class, at one layout.

    A trainer sends the same tensors to every layout: what they are called, and how large they are, is found at
    one rank.

    Args:
        save_to: a directory that gets checkpoints of the class, instead of judging it.
    """
    from .judge import Judge
    from .one_rank import Namer, Saver, read_names

    known = Known()
    if save_to is not None:
        saver = functools.partial(Saver, directory=save_to)
        return _settled(architecture, limit, saver, known)
    if layout == ONE_RANK:
        return _settled(architecture, limit, Judge, known)
    with tempfile.TemporaryDirectory(prefix="census-") as name:
        path = Path(name) / "names.json"
        namer = functools.partial(Namer, path=path, needs_experts=layout.experts > 1)
        row = _settled(architecture, limit, namer, known)
        if not path.exists():
            return row  # it is not built at one rank either
        judge = functools.partial(Judge, names=read_names(path))
        return _settled(architecture, limit, judge, known, layout)


@dataclass
class Known:
    """What attempts to build a class have shown: keys its config lacks, or refuses; its attention."""

    lacks: list[str] = field(default_factory=list)
    refuses: list[str] = field(default_factory=list)
    attention: str = CPU_ATTENTION

    def has_learned(self, row: Row) -> bool:
        """Whether the reason of a failure is mended at the next attempt."""
        why = " ".join(row.reasons)
        lacked, refused = _LACKS.search(why), _REFUSES.search(why)
        if lacked and lacked[1] not in self.lacks:
            self.lacks.append(lacked[1])
        elif refused and refused[1] not in self.refuses:
            self.refuses.append(refused[1])
        elif _ATTENTION.search(why) and self.attention == CPU_ATTENTION:
            # Some models ask for one of SGLang's GPU backends by name; none runs here.
            self.attention = "triton"
        else:
            return False
        return True


_LACKS = re.compile(
    r"(?:'\w*Config\w*' object has no attribute|error for field) '(\w+)'(?!.*got (?!None))"
)
_ATTENTION = re.compile(r"only supports? .*attention|attention.* backend")
_REFUSES = re.compile(r"property '(\w+)' of '\w+' object has no setter")


def _settled(
    architecture: str, limit: float, make: MakeJudge, known: Known, layout: Layout = ONE_RANK
) -> Row:
    """Judged again as long as its config lacks a key, which is added, or refuses one that it wrote."""
    while True:
        run = functools.partial(judge_rank, make=make, known=known, layout=layout, port=free_port())
        row = run_forked(architecture, run, limit, layout.ranks)
        if not known.has_learned(row):
            return row


def judge_rank(
    architecture: str,
    directory: Path,
    rank: int,
    *,
    make: MakeJudge,
    known: Known,
    layout: Layout,
    port: int,
) -> None:
    """In a process of its own: the row into `row.json`."""
    from sglang.srt.models.registry import ModelRegistry

    from .classes import why_missing
    from .configs import tiny_config

    def answer(row: Row) -> None:
        (directory / "row.json").write_text(json.dumps(row.__dict__))

    model_class = ModelRegistry.models.get(architecture)
    if model_class is None:
        answer(Row(architecture, "not built", reasons=[why_missing(architecture)]))
        return
    present = make(architecture, answer)
    present.row.lost = tiny_config(architecture, model_class, directory, known.lacks, known.refuses)
    os.environ["SGLANG_CPU_OMP_THREADS_BIND"] = layout.cores
    arguments = [*layout.arguments(port), *radix_cache(architecture)]
    start(directory, known.attention, present, rank, arguments)


if __name__ == "__main__":
    main(float(sys.argv[1]), Layout.of_name(sys.argv[2]))
