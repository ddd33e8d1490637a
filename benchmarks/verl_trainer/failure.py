"""Why a run never came to its first refit, and what can be done: from the log it left."""

from __future__ import annotations

import re

from verl_trainer.trainer_run import RunResult

RAY_IS_UP = "Started a local Ray instance"
_ERROR = re.compile(r"\b(\w+\.)*\w*(Error|Exception|Killed|OOM)\b.*")


def why_it_never_began(run: RunResult) -> str:
    """One paragraph: what happened, the last error of the log, the remedy."""
    text = run.log.read_text(errors="replace")
    how = "was ended for time" if run.is_timeout else f"exited with {run.returncode}"
    what = f"{run.arm.name}: {how} after {run.seconds:.0f} s, before its first refit."
    errors = [match.group(0) for match in map(_ERROR.search, text.splitlines()) if match]
    said = f" Its last error: {errors[-1][:600]}." if errors else ""
    return f"{what}{said} {_remedy(text)} Log: {run.log}"


def _remedy(text: str) -> str:
    if RAY_IS_UP not in text:
        return (
            "Ray did not come up: it wants some 2 GB of free memory, a writable /tmp and free local "
            "ports, and no CUDA_VISIBLE_DEVICES that is set but empty."
        )
    return "Ray was up: veRL's workers or SGLang's server did not start."
