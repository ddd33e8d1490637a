"""Why a run never came to its first refit, and what can be done: from the log it left."""

from __future__ import annotations

import re

from verl_trainer.trainer_run import RunResult

RAY_IS_UP = "Started a local Ray instance"
# The end of a traceback. Ray's own reports, further down, name its tasks and guess.
_ERROR = re.compile(r"(?:^|\s)(?:\w+\.)*\w*(?:Error|Exception): .+")


def why_it_never_began(run: RunResult) -> str:
    """One paragraph: what happened, the first error of the log, the remedy."""
    text = run.log.read_text(errors="replace")
    how = "was ended for time" if run.is_timeout else f"exited with {run.returncode}"
    what = f"{run.arm.name}: {how} after {run.seconds:.0f} s, before its first refit."
    error = _ERROR.search(text)
    said = f" Its first error: {error.group(0).strip()[:600]}." if error else ""
    return f"{what}{said} {_remedy(text)} Log: {run.log}"


def _remedy(text: str) -> str:
    if RAY_IS_UP not in text:
        return (
            "Ray did not come up: it wants some 2 GB of free memory, a writable /tmp and free local "
            "ports, and no CUDA_VISIBLE_DEVICES that is set but empty."
        )
    return "Ray was up: veRL's workers or SGLang's server did not start."
