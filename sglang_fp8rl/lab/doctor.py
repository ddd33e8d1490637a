"""`sglang-fp8rl doctor`: whether this machine can serve, and if not, why.

It has to run where nothing else does: on an SGLang that is not supported, and without any extra.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import shutil
import warnings
from collections.abc import Callable, Sequence
from typing import NamedTuple

from packaging.version import Version

from ..compat import (
    CPU_PLATFORM,
    NEWEST_EXCLUDED,
    OLDEST,
    TESTED,
    check_host,
    host_named,
    host_version,
    installed,
    release_of,
)
from ..config import QUANTIZATION_METHOD
from ..declared_hooks import targets_not_hooked
from ..errors import HostError
from .host_symbols import check_symbols

OK, NOTE, PROBLEM = "ok", "note", "problem"
MIN_CAPABILITY = (8, 9)
MIN_SHM_BYTES = 1 << 30

# Environment variables of SGLang that lead away from what is served here.
_BAD_VARIABLES = {
    "SGLANG_USE_CPU_ENGINE": "its CPU kernels are not in the released wheel",
    "SGLANG_FORCE_FP8_MARLIN": "Marlin repacks weights, so they can't be written in place",
}

# Trainers with a recipe beside veRL, by the name of what is installed.
_OTHER_TRAINERS = ("areal", "trl", "slime", "miles", "miles-rl")
# What the verdict is about: its check that names it, and the others that are about it; the rest is the machine's.
_SUBJECTS = {
    "machine": ("device", ()),
    "SGLang": ("SGLang", ("known-bad packages", "host symbols", "plugin")),
    "trainer": ("trainer", ()),
}


class Finding(NamedTuple):
    """One line of the table. `state` is `ok`, `note` (works, worth knowing) or `problem`."""

    check: str
    state: str
    detail: str


def examine(on_check: Callable[[str], None] = lambda _: None) -> list[Finding]:
    """Every check, in order. Imports torch and SGLang.

    Side effects: without a GPU, `SGLANG_PLATFORM` is set in this process, so that SGLang imports as
    it would in a server on the CPU reference platform.
    """
    findings: list[Finding] = []
    for name, check in _CHECKS:
        on_check(name)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what packages say while they are imported
            findings += [Finding(name, state, detail) for state, detail in _lines(check)]
    return findings


def verdict(findings: Sequence[Finding]) -> str:
    """One line: whether this machine, this SGLang and this trainer fit, and which they are, or why not, in two reasons."""
    of = {check: one for one, (named_by, more) in _SUBJECTS.items() for check in (named_by, *more)}
    said = []
    for subject, (named_by, _) in _SUBJECTS.items():
        about = [one for one in findings if of.get(one.check, "machine") == subject]
        problems = [one.detail for one in about if one.state == PROBLEM]
        named = [one.detail for one in about if one.check == named_by]
        if about:
            how = "does not fit" if problems else "fits"
            more = [f"{len(problems) - 2} more, above"] if len(problems) > 2 else []
            said.append(f"this {subject} {how} ({'; '.join([*problems[:2], *more] or named)})")
    return ", ".join(said)


Lines = list[tuple[str, str]]  # state and detail


def _lines(check: Callable[[], Lines]) -> Lines:
    """What a check found; where packages don't fit together, what their import ends with."""
    try:
        return list(check())
    except Exception as error:  # noqa: BLE001  AttributeError, OSError, …: what they look for in each other
        detail = f"can't be imported: {error}; a package is missing, or another overwrote its files: install it again"
        return [(PROBLEM, detail)]


def _problems(problems: list[str], otherwise: str) -> Lines:
    return [(PROBLEM, text) for text in problems] or [(OK, otherwise)]


def _host() -> Lines:
    problems = check_host()
    if problems or installed("sglang") in TESTED:
        return _problems(problems, f"{host_named()}, tested")
    supported = f"{host_named()} is in the supported range >={OLDEST},<{NEWEST_EXCLUDED}"
    return [(NOTE, f"{supported}; tested are {', '.join(TESTED)}")]


def _known_bad() -> Lines:
    host, kernels = host_version(), release_of(installed("kernels"))
    is_bad = host and kernels and host < Version("0.5.17") and kernels >= Version("0.15")
    text = f"kernels {kernels}: SGLang does not import with it; install kernels<0.15"
    return _problems([text] if is_bad else [], "none installed")


def _environment() -> Lines:
    is_on = ("1", "true", "yes", "y")  # as SGLang reads them
    bad = [name for name in _BAD_VARIABLES if os.environ.get(name, "").lower() in is_on]
    problems = [f"{name} is set: {_BAD_VARIABLES[name]}; unset it" for name in bad]
    return _problems(problems, "no variable of SGLang stands in the way")


def _device() -> Lines:
    import torch

    if not torch.cuda.is_available():
        os.environ.setdefault("SGLANG_PLATFORM", CPU_PLATFORM)
        advice = f"serve with SGLANG_PLATFORM={CPU_PLATFORM} (the CPU reference platform: exact, not fast)"
        return [(NOTE, f"no GPU seen by torch {torch.__version__}: {advice}")]
    capability = torch.cuda.get_device_capability()
    text = f"{torch.cuda.get_device_name()}, compute capability {capability[0]}.{capability[1]}"
    too_old = [f"{text}; FP8 tensor cores begin with 8.9 (Ada, Hopper)"]
    return _problems(too_old if capability < MIN_CAPABILITY else [], text)


def _sharing() -> Lines:
    import torch.multiprocessing

    strategy = torch.multiprocessing.get_sharing_strategy()
    ours = "RefitClient and the CPU platform by file_system"
    lines = [(OK, f"torch shares CPU tensors by {strategy}; {ours}")]
    if os.path.isdir("/dev/shm"):
        free = shutil.disk_usage("/dev/shm").free
        detail = f"/dev/shm has {free / 1e9:.1f} GB free; a bucket of CPU tensors has to fit"
        lines.append((OK if free >= MIN_SHM_BYTES else NOTE, detail))
    return lines


def _symbols() -> Lines:
    if check_host():
        return [(NOTE, "not looked at: the version is not supported")]
    return _problems(check_symbols(), "every host symbol that is used is there")


def _plugin() -> Lines:
    if check_host():
        return [(NOTE, "registers nothing on this host")]
    entry_points = importlib.metadata.entry_points
    missing = [
        group
        for group in ("sglang.srt.plugins", "sglang.srt.platforms", "verl.plugins")
        if not any(one.value.startswith("sglang_fp8rl.") for one in entry_points(group=group))
    ]
    if missing:
        return [(PROBLEM, f"no entry point in {', '.join(missing)}; install the package again")]
    from sglang.srt.layers.quantization import QUANTIZATION_METHODS
    from sglang.srt.plugins import load_plugins

    load_plugins()
    if QUANTIZATION_METHOD not in QUANTIZATION_METHODS:
        only = os.environ.get("SGLANG_PLUGINS")
        why = f"SGLANG_PLUGINS={only} leaves it out" if only else "see the log lines above"
        return [(PROBLEM, f"SGLang did not take it: {why}")]
    unhooked = targets_not_hooked().items()
    problems = [f"hook not applied: {target} ({hook.reason})" for target, hook in unhooked]
    fine = f"--quantization {QUANTIZATION_METHOD} is registered, every hook is applied"
    return _problems(problems, fine)


def _trainer() -> Lines:
    lines = _verl() if installed("verl") else []
    for name in _OTHER_TRAINERS:
        if version := installed(name):
            lines.append((NOTE, f"{name} {version}; docs/recipes says how far it was tried"))
            if overwritten := _files_in_sglang(name):
                detail = (
                    f"{name} {version} has {overwritten} files of its own in sglang/, over your SGLang's: uninstall "
                    f"it, install SGLang again, and {name} from its repository"
                )
                lines.append((PROBLEM, detail))
    return lines or [(OK, "none is installed here; plain HTTP and RefitClient need none")]


def _verl() -> Lines:
    from ..verl_plugin import TESTED_VERL, check_verl

    tested = ", tested" if installed("verl") == TESTED_VERL else f"; {TESTED_VERL} is"
    return _problems(check_verl(), f"verl {installed('verl')}{tested}")


def _files_in_sglang(name: str) -> int:
    """How many files a package has installed into SGLang's own folder."""
    return sum(file.parts[0] == "sglang" for file in importlib.metadata.files(name) or ())


def _casts() -> Lines:
    lines = []
    for package, folder, where in (("numba", "cpu", "a CPU"), ("triton", "triton", "a GPU")):
        try:
            importlib.import_module(package)
            importlib.import_module(f"sglang_fp8rl.numerics.{folder}")
            lines.append((OK, f"{package} {installed(package)}: fast casts on {where}"))
        except ImportError as error:
            lines.append((NOTE, f"{package} can't be used ({error}): plain torch casts on {where}"))
        except HostError as error:
            lines.append((PROBLEM, str(error)))
    return lines


_CHECKS: tuple[tuple[str, Callable[[], Lines]], ...] = (
    ("SGLang", _host),
    ("known-bad packages", _known_bad),
    ("environment", _environment),
    ("device", _device),
    ("tensor sharing", _sharing),  # before the plugin changes it in this process
    ("host symbols", _symbols),
    ("plugin", _plugin),
    ("trainer", _trainer),
    ("casts", _casts),
)
