"""The child process of `grading.Grader`: JSON lines in, JSON lines out, Math-Verify in between."""

from __future__ import annotations

import json
import logging
import resource
import sys
import time

MEMORY_LIMIT = 4 << 30  # bytes of address space: an answer like 10^(10^9) must not take the host
TIME_LIMIT = 5  # seconds, for reading and for comparing each


def main() -> None:
    replies, sys.stdout = sys.stdout, sys.stderr  # whatever a library prints is no reply
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_LIMIT, MEMORY_LIMIT))
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

    logging.getLogger("math_verify").setLevel(logging.ERROR)  # a time-out is a status, not a log
    # Anchors only: "x=1 204" names no answer, though it would be read as one.
    targets = [
        LatexExtractionConfig(boxed_match_priority=0, try_extract_without_anchor=False),
        ExprExtractionConfig(try_extract_without_anchor=False),
    ]
    print(json.dumps({"status": "ready"}), file=replies, flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        started = time.monotonic()
        reference = parse(f"\\boxed{{{request['reference']}}}", targets, parsing_timeout=TIME_LIMIT)
        answer = parse(request["answer"], targets, parsing_timeout=TIME_LIMIT)
        correct = verify(reference, answer, timeout_seconds=TIME_LIMIT)
        if correct:
            status = "correct"
        elif time.monotonic() - started >= TIME_LIMIT:
            status = "timeout"
        else:
            status = "wrong" if answer else "no_answer"
        print(json.dumps({"status": status}), file=replies, flush=True)


if __name__ == "__main__":
    main()
