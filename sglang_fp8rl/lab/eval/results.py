"""What the task writes into Inspect's logs and the report reads."""

from __future__ import annotations

from ...errors import Fp8RlError

SCORER = "math_verify"  # the score's name in a log


class ResultsError(Fp8RlError):
    """Logs that can't be continued."""
